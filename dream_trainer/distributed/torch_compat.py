"""Every private or moving PyTorch name that Dream Trainer leans on, each behind a function of ours.

`tests/distributed/test_torch_compat.py` exercises each one, so a PyTorch release that moves a name fails there
first and is mended here alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, without `to_local()`'s autograd node; a plain tensor as it is.

    `to_local()` costs about 5 microseconds per parameter (TORCH.md section 14); the attribute costs nothing.
    """
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients that are there, of parameters that are all DTensors."""
    return [p.grad._local_tensor for p in parameters if p.grad is not None]  # type: ignore[attr-defined]


def storage_id(tensor: Tensor) -> int:
    """An identity shared by all tensors that view one storage, for meta tensors too (whose data pointer is 0)."""
    return tensor.untyped_storage()._cdata


def default_generator_of(device: torch.device) -> torch.Generator:
    """The generator that random ops on `device` draw from when none is given."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_clamp_max_ = torch._foreach_clamp_max_


def gathered_twins(module: FSDPModule) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """(sharded, gathered) pairs of the parameters that `fully_shard(module)` manages, as far as a forward made them.

    The gathered one's `requires_grad` is copied from the sharded one at the first gather, and never again.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return []
    return [(p.sharded_param, p._unsharded_param) for p in group.fsdp_params if "_unsharded_param" in vars(p)]


def sharded_parameters(module: FSDPModule) -> list[torch.nn.Parameter]:
    """The sharded parameters that `fully_shard(module)` manages, whether or not they are gathered at the moment."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else [p.sharded_param for p in group.fsdp_params]


def compiled_original(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module inside `torch.compile(module)`, or None if `module` is no such wrapper. Imports no compiler."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return None
    return module._orig_mod


def shutdown_workers(iterator: object) -> None:
    """Ends the worker processes of a `DataLoader`'s iterator now, though something (a traceback) may still refer to
    it."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


def without_torch_function() -> AbstractContextManager[None]:
    """A context in which no `__torch_function__`, of modes or of subclasses, is called."""
    return torch._C.DisableTorchFunction()


def write_count(tensor: Tensor) -> int:
    """How many in-place operations have gone through `tensor` or its views: autograd's version counter."""
    return 0 if tensor.is_inference() else tensor._version


def reset_attention_parameters(module: torch.nn.MultiheadAttention | torch.nn.Transformer) -> None:
    """What other modules call `reset_parameters`: these two alone spell it with an underscore."""
    module._reset_parameters()


def dcp_metadata_globals() -> frozenset[tuple[str, str]]:
    """The (module, name) pairs that DCP's pickled `.metadata` refers to when only tensors were saved, data types aside.

    Pairs, not modules: a pickle may ask for `os.system` by way of any module that imports `os`.
    """
    metadata = "torch.distributed.checkpoint.metadata"
    records = ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
    return frozenset(
        {
            *((metadata, name) for name in (*records, "StorageMeta", "_MEM_FORMAT_ENCODING")),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
    )


def changes_in_place(tensor: Tensor) -> bool:
    """Whether something was ever written into `tensor`, so that it may be written into again."""
    return write_count(tensor) > 0


def set_group_timeout(group: ProcessGroup | None, timeout: timedelta) -> None:
    """Sets how long collectives of `group` (None: the default group) may take from now on."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)
