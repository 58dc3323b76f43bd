"""What a collective gives that is still running, where compiled code takes it (`AsyncCollectiveTensor` is private)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: Any) -> Tensor:
        # Detached: the tensor inside may be handed out again, and would else take its place in two graphs.
        waited: Tensor = running.trigger_wait().detach()
        return waited

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def waited(value: Any) -> Any:
    """`value`, or the finished tensor if a collective gives it that may still run; gradients pass.

    A compiled function takes the tensor inside for its input, which needs no gradient: nothing before it is trained
    (docs/measurements/ranks.md#compile-with-tensor-parallelism)."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return _Waited.apply(value) if isinstance(value, AsyncCollectiveTensor) else value  # type: ignore[no-untyped-call]


def gathered_in_graph(flat: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """What `size` ranks of a group have, one after the other, by a collective that graphs of the compiler can have."""
    ops = torch.ops._c10d_functional
    gathered: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(flat, size, group.group_name))
    return gathered


def summed_in_graph(flat: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum over `size` ranks, whose parts lie one after the other; as `gathered_in_graph`."""
    ops = torch.ops._c10d_functional
    own: Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(flat, "sum", size, group.group_name))
    return own


def exchanged_in_graph(flat: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """The parts that `size` ranks have for this one, of which each has as many; as `gathered_in_graph`."""
    ops, parts = torch.ops._c10d_functional, [flat.numel() // size] * size
    exchanged: Tensor = ops.wait_tensor(ops.all_to_all_single(flat, parts, parts, group.group_name))
    return exchanged


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


def options_of_overlap(mode: str | None) -> dict[str, Any]:
    """What `torch.compile(options=...)` has to be told, which takes no `mode` beside it."""
    from torch._inductor import list_mode_options

    return {**(list_mode_options(mode) if mode else {}), "_micro_pipeline_tp": True}
