"""Linear operations over ranks, with gradients: each comes with its adjoint, so that gradients have gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, operation: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.of_backward = adjoint, operation
        return operation(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        return linear(gradients[0], *ctx.of_backward), None, None


def linear(values: Tensor, operation: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    """`operation(values)`; its backward is `adjoint`, whose backward is `operation` again."""
    result: Tensor = _Linear.apply(values, operation, adjoint)  # type: ignore[no-untyped-call]
    return result
