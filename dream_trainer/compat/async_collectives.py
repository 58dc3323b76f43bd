"""What a collective gives that is still running, where compiled code takes it (`AsyncCollectiveTensor` is private)."""

from __future__ import annotations

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
    (docs/measurements.md#compile-with-tensor-parallelism)."""
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
