"""What a collective gives that is still running, where compiled code takes it.

`AsyncCollectiveTensor` is private; `tests/compat/test_async_collectives.py` exercises what is here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    """`value`, or the finished tensor if it is what a collective gives that may still run; gradients pass.

    A compiled function waits by itself, but takes the tensor inside for its input, which needs no gradient: nothing
    before it is trained then (docs/measurements.md#compile-with-tensor-parallelism).
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return _Waited.apply(value) if isinstance(value, AsyncCollectiveTensor) else value  # type: ignore[no-untyped-call]
