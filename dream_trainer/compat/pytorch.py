"""Every private or moving PyTorch name that Dream Trainer leans on; tests exercise each."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist  # which makes the module below
import torch.nn as nn
from torch import Tensor
from torch._C._distributed_c10d import (
    HashStore as HashStore,
    PrefixStore as PrefixStore,
    Store as Store,
    TCPStore as TCPStore,
)
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed import ProcessGroup
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter as tree_iter, tree_map as tree_map
from torch.utils.checkpoint import _StopRecomputationError
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import TypeIs

if TYPE_CHECKING:
    import io
    from datetime import timedelta
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Placement
    from torch.overrides import TorchFunctionMode


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether it is a DTensor. Loads no module: that of DTensor is slow to load (sympy comes with it)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def has_values(tensor: Tensor) -> bool:
    """Whether it has any: not on meta, and not of a plan."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return not (tensor.is_meta or (module is not None and isinstance(tensor, module.FakeTensor)))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, without `to_local()`'s autograd node (5 us); a plain tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    from torch.distributed.tensor import DTensor

    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def storage_id(of: Tensor | torch.UntypedStorage) -> int:
    """An identity shared by all tensors that view one storage, for meta tensors too (whose data pointer is 0)."""
    return int((of.untyped_storage() if isinstance(of, Tensor) else of)._cdata)


def default_generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
foreach_div_ = torch._foreach_div_  # pyright: ignore[reportPrivateImportUsage]
foreach_clamp_min_ = torch._foreach_clamp_min_  # pyright: ignore[reportPrivateImportUsage]
foreach_clamp_max_ = torch._foreach_clamp_max_  # pyright: ignore[reportPrivateImportUsage]
foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_lerp_ = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]


# These collectives are new in 2.13, which warns of the former ones. To compare versions takes 60 microseconds.
_HAS_SINGLE = torch.__version__ >= "2.13"


def all_gather_flat(gathered: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """Fills `gathered` with every rank's `own`, one after the other; `own` may be this rank's place in it."""
    gather = dist.all_gather_single if _HAS_SINGLE else dist.all_gather_into_tensor
    gather(gathered, own, group=group)


def sum_scatter_flat(own: Tensor, every: Tensor, group: ProcessGroup) -> None:
    """Fills `own` with the sum over ranks of this one's part of `every`, whose parts lie one after the other."""
    scatter = dist.reduce_scatter_single if _HAS_SINGLE else dist.reduce_scatter_tensor
    scatter(own, every, op=dist.ReduceOp.SUM, group=group)


def function_modes() -> list[TorchFunctionMode]:
    """The modes that override functions at the moment, from the outermost; in a backward there are none."""
    return list(_get_current_function_mode_stack())


def gathered_twins(module: FSDPModule) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """(sharded, gathered) parameters of `fully_shard(module)`; only the first gather copies `requires_grad`."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return []
    return [(p.sharded_param, p._unsharded_param) for p in group.fsdp_params if "_unsharded_param" in vars(p)]


@contextmanager
def whole_parameters(module: FSDPModule) -> Iterator[None]:
    """Replaces the parameters of `fully_shard(module)` by plain, unsharded copies in full precision; a collective.
    Inside, forwards gather and cast nothing. Over a tensor-parallel dimension the parameters stay split."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    state = module._get_fsdp_state()
    group = state._fsdp_param_group
    if group is None:
        yield
        return
    if vars(group).get("is_held"):  # gathered already, in the type that it computes in
        held: Any = group
        held.show("_unsharded_param")
        yield
        held.show("sharded_param")
        return
    module.reshard()
    # A group whose state is gathered gathers nothing; `state_dict()` would switch it back to its shards.
    before = group.post_forward_mesh_info, state._mp_policy
    group.post_forward_mesh_info, state._mp_policy = None, MixedPrecisionPolicy()
    gathered = [vars(managed).get("_unsharded_param") for managed in group.fsdp_params]
    for managed in group.fsdp_params:
        with torch._C.DisableTorchFunctionSubclass():  # while it can be touched
            shard = managed.sharded_param.detach()
        whole = whole_of(shard).to(group.device)
        managed._unsharded_param = torch.nn.Parameter(whole, managed.sharded_param.requires_grad)  # 2.15 looks for it
        managed._setattr_on_modules(managed._unsharded_param)
    group._sharded_state = ShardedState.UNSHARDED
    group._to_sharded = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del group._to_sharded
        group._sharded_state = ShardedState.SHARDED
        group.post_forward_mesh_info, state._mp_policy = before
        for managed, twin in zip(group.fsdp_params, gathered, strict=True):
            managed._setattr_on_modules(managed.sharded_param)
            if twin is None:
                del managed._unsharded_param
            else:
                managed._unsharded_param = twin


def whole_of(parameter: Any) -> Tensor:
    """All of a parameter that `fully_shard` cut; still split over tensor-parallel ranks, if it was before."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    if "tp" not in (mesh.mesh_dim_names or ()):
        return cast(Tensor, parameter.full_tensor())
    tp_placement = parameter.placements[-1]
    local = parameter.redistribute(placements=[*[Replicate()] * (mesh.ndim - 1), tp_placement]).to_local()
    return DTensor.from_local(
        local, mesh["tp"], [tp_placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


@contextmanager
def tf32_products() -> Iterator[None]:
    """Inside, float32 matrix products and convolutions on CUDA may use TF32, by the setting that the process uses."""
    cudnn: Any = torch.backends.cudnn
    newer: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    with ExitStack() as stack:
        try:
            products, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
        except RuntimeError:
            for setting in newer:
                stack.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
                setting.fp32_precision = "tf32"
        else:
            stack.callback(torch.set_float32_matmul_precision, products)
            stack.callback(setattr, cudnn, "allow_tf32", convolutions)
            torch.set_float32_matmul_precision("high")
            cudnn.allow_tf32 = True
        yield


def tf32_is_allowed() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        matmul: Any = torch.backends.cuda.matmul
        return bool(matmul.fp32_precision == "tf32")


@contextmanager
def with_parameters(module: torch.nn.Module, replaced: dict[str, Tensor]) -> Iterator[None]:
    """Inside, `module` computes with the given tensors instead of its parameters with those names."""
    originals = dict(module._parameters)
    module._parameters.update(replaced)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(originals)


def begin_root(module: FSDPModule) -> None:
    """Makes `module` the root of its FSDP states now, before a block that is called on its own becomes it."""
    module._get_fsdp_state()._lazy_init()


def end_workers(loader: object) -> None:
    """Ends the workers that a `DataLoader` keeps from its last iteration; exit would wait 5 s for each."""
    if isinstance(loader, torch.utils.data.DataLoader) and (iterator := vars(loader).get("_iterator")) is not None:
        shutdown_workers(iterator)
        loader._iterator = None


def shutdown_workers(iterator: object) -> None:
    """Ends a `DataLoader` iterator's workers; those that load for longer than 1 s are killed."""
    from torch._C import _remove_worker_pids

    # torchdata's iterators share this base and the names, and not the class for several processes.
    if not isinstance(iterator, _BaseDataLoaderIter) or iterator._num_workers == 0:
        return
    several: Any = iterator
    if several._worker_pids_set:  # else a killed worker is an error in this process
        several._worker_pids_set = False
        _remove_worker_pids(id(several))
    workers = list(several._workers)
    timer = threading.Timer(1.0, lambda: [worker.kill() for worker in workers])
    timer.start()
    try:
        several._shutdown_workers()
    finally:
        timer.cancel()
        timer.join()


without_torch_function = torch._C.DisableTorchFunction  # of modes or of subclasses


def unnoticed_writes(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """A context where writes to these tensors keep their version: autograd takes them for unchanged."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors))


def reading_waits(device: torch.device) -> bool:
    return device.type != "cpu"


def of_class_of(tensor: Tensor, values: Tensor) -> Tensor:
    """`values` as a tensor of the class of `tensor`, with its attributes and `requires_grad`."""
    new = Tensor._make_subclass(type(tensor), values.detach(), tensor.requires_grad)
    vars(new).update(vars(tensor))
    return new


def write_count(tensor: Tensor) -> int:
    """How many in-place operations have gone through `tensor` or its views: autograd's version counter."""
    return 0 if tensor.is_inference() else tensor._version


def reset_attention_parameters(module: torch.nn.MultiheadAttention | torch.nn.Transformer) -> None:
    """Calls their `reset_parameters`: only these two modules spell it with an underscore."""
    module._reset_parameters()


def second_lists(module: torch.nn.Module) -> tuple[str, ...]:
    """Attributes that list a recurrent module's parameters a second time, and that it keeps up to date."""
    return ("_flat_weights",) if isinstance(module, torch.nn.RNNBase) else ()


def dcp_metadata_globals() -> frozenset[tuple[str, str]]:
    """The (module, name) pairs that DCP's `.metadata` may refer to: a pair, as any module may import `os`."""
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


def merge_plans_of_parts(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Like `DefaultSavePlanner.create_global_plan`, without the check that the parts cover each tensor."""
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

    return create_default_global_save_plan(dedup_save_plans(plans))


def set_group_timeout(group: ProcessGroup | None, timeout: timedelta) -> None:
    """Sets how long collectives of `group` (None: the default group) may take from now on."""
    if torch.__version__ >= "2.15":
        dist.set_timeout(timeout, group)  # type: ignore[attr-defined]  # new there, which warns of the other
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def enable_flight_recorder(directory: Path) -> None:
    """Makes NCCL's groups write their last collectives into `directory` on a time-out or error; before the first group
    is made, since torch reads these once in a process, the newer names first."""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if os.environ.keys().isdisjoint(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")):
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{directory.absolute()}/rank_"
        directory.mkdir(parents=True, exist_ok=True)  # torch opens the file and makes no directory


def recorded_collectives() -> bytes | None:
    """The flight recorder's dump of this rank's last collectives, pickled; None without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch._C import _distributed_c10d

    if "nccl" in dist.get_backend_config():
        return bytes(_distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]
    return bytes(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]


def connect_again(store: Store) -> Store:
    """A further connection to the server of `store`: a blocking call on one holds up other threads' on it."""
    return cast("Store", store.clone())  # type: ignore[attr-defined]  # missing in PyTorch's stubs


def shard_dim(placement: Placement) -> int | None:
    """The dimension that a placement cuts, contiguously or strided (which `is_shard()` leaves out); None if none."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def file_window(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """A part of an open file, as a file that `torch.load` reads; a BytesIO would hold it twice in memory."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return cast("IO[bytes]", _create_file_view(cast("io.IOBase", file), offset, length))


def with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """`local` as this rank's shard in a DTensor like `tensor`, left on its device; `local` itself if that is plain."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


def forget_meshes() -> None:
    """Makes DTensors forget the meshes of a process group that is destroyed. They take one over the same ranks for the
    same, although its groups are new; and what remembers a mesh keeps some 20 connections and threads of its groups."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed.tensor.")]:
        _clear_caches(vars(module).values())
    redistribution = vars(sys.modules["torch.distributed.tensor._redistribute"])
    redistribution.get("_planner_cache", {}).clear()  # not in PyTorch 2.11


def _clear_caches(members: Iterable[object]) -> None:
    """Clears `functools.cache`s among the members of a module or class, and of its classes."""
    for member in members:
        inner = member.__func__ if isinstance(member, staticmethod) else member
        if isinstance(inner, functools._lru_cache_wrapper):
            inner.cache_clear()
        elif isinstance(inner, type) and inner.__module__.startswith("torch.distributed.tensor."):
            _clear_caches(m for m in vars(inner).values() if not isinstance(m, type))


def record_memory_history(max_entries: int) -> None:
    """From now on keeps the last `max_entries` allocations and releases on CUDA devices with their stacks; 0 stops."""
    torch.cuda.memory._record_memory_history("all" if max_entries else None, max_entries=max_entries or 1)


def write_memory_snapshot(path: Path) -> None:
    """Writes CUDA allocations and their history, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


_OF_TENSORS = frozenset(dir(Tensor))


def changes_its_first(func: Any) -> bool:
    """Whether a function of PyTorch changes its first argument, as its name says: `add_`, `__iadd__`."""
    name = getattr(func, "__name__", "")
    is_operator = name == "__setitem__" or (name.startswith("__i") and f"__{name[3:]}" in _OF_TENSORS)
    return is_operator or (name.endswith("_") and not name.endswith("__"))


def in_backward() -> bool:
    """Whether this thread computes a backward, which recomputes checkpointed activations."""
    return torch._C._current_graph_task_id() != -1


def plain_beside_dtensors() -> AbstractContextManager[None]:
    """Inside, an operation over lists of both kinds takes each plain tensor as it is, one that all ranks have."""
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def is_persistent(module: nn.Module, buffer: str) -> bool:
    return buffer not in module._non_persistent_buffers_set


AnyBatchNorm = nn.modules.batchnorm._BatchNorm
NormWithStatistics = nn.modules.batchnorm._NormBase


def keep_own_generators(mesh: DeviceMesh) -> None:
    """Makes DTensors draw from each rank's own generator; call it before any of them draws. On a GPU PyTorch would make
    a tracker then, by a collective that copies rank 0's generator to the whole world: data-parallel ranks would draw
    equal numbers in dropout, and wait for stages that draw none."""
    if mesh.device_type == "cpu":
        return
    from torch.distributed.tensor._random import manual_seed

    device = torch.get_device_module(mesh.device_type).current_device()
    with torch.random.fork_rng(devices=[device], device_type=mesh.device_type):
        manual_seed(0, mesh)  # makes the tracker, without a collective


def inner_schedulers(scheduler: LRScheduler | ReduceLROnPlateau) -> list[LRScheduler]:
    """All schedulers that a SequentialLR or ChainedScheduler is made of, at any depth."""
    if not isinstance(scheduler, SequentialLR | ChainedScheduler):
        return []
    return [part for one in scheduler._schedulers for part in (one, *inner_schedulers(one))]


def steps_taken(scheduler: LRScheduler | ReduceLROnPlateau) -> int:
    """How often a scheduler was stepped since its beginning; 0 of one of a user class that keeps no count."""
    if isinstance(scheduler, ChainedScheduler):
        return max(steps_taken(part) for part in scheduler._schedulers)
    return cast(int, vars(scheduler).get("last_epoch", 0))


OfTensors = WeakTensorKeyDictionary  # a value for each tensor, also when its python object dies and comes back


def share_hooks(tensor: Tensor, former: Tensor) -> None:
    """Makes autograd call the hooks of `former` for `tensor`, also later ones. A swapped tensor needs it of itself."""
    if former._backward_hooks is not None:
        tensor._backward_hooks = former._backward_hooks
    if former._post_accumulate_grad_hooks is not None:
        tensor._post_accumulate_grad_hooks = former._post_accumulate_grad_hooks


def has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Calls no hook of `register_hook` inside the block."""
    taken = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]
    for hooks, _ in taken:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, former in taken:
            hooks.update(former)


def after_accumulation(parameters: Iterable[nn.Parameter]) -> None:
    """Calls what autograd calls when it has added to `grad`, for those whose `grad` something else has added to."""
    for parameter in parameters:
        if parameter._post_accumulate_grad_hooks and parameter.grad is not None:
            for hook in tuple(parameter._post_accumulate_grad_hooks.values()):
                hook(parameter)


StopRecomputation = _StopRecomputationError
"""Ends the second run of a checkpointed forward when all that its backward needs is there."""

EXPENSIVE_OPERATIONS = (  # matrix products, convolutions, attention and collectives, kept by "selective"
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten.convolution.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
)


def operation(name: str) -> OpOverload | None:
    """The operation of a name such as `"aten.mm.default"`; None for one of our defaults that this PyTorch lacks."""
    try:
        namespace, packet, overload = name.split(".")
        return cast(OpOverload, getattr(getattr(getattr(torch.ops, namespace), packet), overload))
    except (ValueError, AttributeError, RuntimeError):
        if name in EXPENSIVE_OPERATIONS:
            return None
        raise ValueError(
            f'PyTorch has no operation {name!r}. Names look like "aten.mm.default": namespace, operation, overload.'
        ) from None


def name_of_operation(function: Any) -> tuple[str, str] | None:
    """Namespace and name of an operation of `torch.ops`, whichever overload; None of any other function."""
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        return None
    namespace, name, *_ = str(function).split(".")
    return namespace, name


class ValueReads(TorchDispatchMode):
    """Inside, counts how often the value of a tensor is read on the host, as `item()` does: it waits for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
