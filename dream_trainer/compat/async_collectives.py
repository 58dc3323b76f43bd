"""Results of running collectives as inputs of compiled code (`AsyncCollectiveTensor` is private)."""

from __future__ import annotations

import sys
import warnings
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_OPS = torch.ops._c10d_functional


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: Any) -> Tensor:
        # Detached: the inner tensor may be returned again, and would otherwise be in two graphs.
        waited: Tensor = running.trigger_wait().detach()
        return waited

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def waited(value: Any) -> Any:
    """`value`, or the finished tensor if it is the result of a collective that may still run; gradients pass."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return _Waited.apply(value) if isinstance(value, AsyncCollectiveTensor) else value  # type: ignore[no-untyped-call]


def is_traced(tensor: Tensor) -> bool:
    """Whether the compiler makes a graph of what is computed with a tensor."""
    module = sys.modules.get("torch._subclasses.functional_tensor")
    return module is not None and isinstance(tensor, module.FunctionalTensor)


def gathered_in_graph(flat: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """All-gathers from `size` ranks of a group, one after the other, by a collective that compiled graphs can have."""
    return cast(Tensor, _OPS.wait_tensor(_OPS.all_gather_into_tensor(flat, size, group.group_name)))


def summed_in_graph(flat: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum over `size` ranks, whose parts lie one after the other; like `gathered_in_graph`."""
    return cast(Tensor, _OPS.wait_tensor(_OPS.reduce_scatter_tensor(flat, "sum", size, group.group_name)))


def exchanged_in_graph(flat: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """Exchanges equal parts among `size` ranks, returning those for this rank; like `gathered_in_graph`."""
    parts = [flat.numel() // size] * size
    return cast(Tensor, _OPS.wait_tensor(_OPS.all_to_all_single(flat, parts, parts, group.group_name)))


def why_memory_is_not_shared(group: ProcessGroup, device: torch.device) -> str | None:
    """Lets the ranks of `group` read each other's memory, or says why they cannot; a collective on GPUs."""
    if device.type != "cuda":
        return f"the device is {device.type!r}"
    from torch.distributed import _symmetric_memory as symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions need no call
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
    try:
        symmetric_memory.rendezvous(symmetric_memory.empty(1, device=device), group)
    except RuntimeError as error:
        return str(error)
    return None


def options_of_mode(mode: str | None) -> dict[str, Any]:
    """Options for `torch.compile(options=...)`, which does not accept `mode` at the same time."""
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode)} if mode else {}
