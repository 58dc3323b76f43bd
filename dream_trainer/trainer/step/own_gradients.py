"""OwnGradients: code that uses gradients before they are those of the global batch.

Until `step`, the gradients of replicas, and of sharded models that are whole in steps, are this rank's own. A norm that
is clipped by hand between `backward` and `step`, or weights that are moved along a gradient there, would differ by rank
without an error. `reduce_gradients` makes them equal first; this notices where it was not called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.compat.pytorch import local_tensor, write_count
from dream_trainer.errors import StepError

if TYPE_CHECKING:
    from dream_trainer.compat.local_gradients import LocalGradients

_WATCHED = 8  # parameters of each optimizer: clipping, noise and perturbations change all of them
_FIX = "Call self.reduce_gradients(optimizer) after the last backward() and before this code"


class _Mark(NamedTuple):
    parameter: nn.Parameter
    gradient: Tensor | None
    writes_to_gradient: int
    writes_to_parameter: int


class OwnGradients:
    """What a backward left on some parameters of each optimizer.

    Args:
        gradients: Which parameters have their gradients reduced in the backward.
    """

    def __init__(self, gradients: LocalGradients) -> None:
        self._gradients = gradients
        self._marks: dict[Optimizer, list[_Mark]] = {}

    def note(self, optimizers: Iterable[Optimizer]) -> None:
        """A backward ran, or gradients were reduced: looks at them as they are now."""
        self._marks = {optimizer: self._look_at(optimizer) for optimizer in optimizers}

    def forget(self) -> None:
        """A window begins, or optimizers have stepped."""
        self._marks.clear()

    def refuse_changed_weights(self) -> None:
        """Raises StepError if weights have changed since the last backward."""
        for marks in self._marks.values():
            for mark in marks:
                if write_count(mark.parameter) != mark.writes_to_parameter:
                    raise StepError(
                        f"parameters of shape {tuple(mark.parameter.shape)} were changed between two backward() calls "
                        "or between backward() and step(), while gradients are this rank's own: along them, each "
                        f"rank's weights would go another way. {_FIX}; or change weights after step()."
                    )

    def refuse_changed_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Raises StepError if gradients of `optimizers` have changed since the last backward."""
        for optimizer in optimizers:
            for mark in self._marks.get(optimizer, ()):
                now = mark.parameter.grad
                if now is None or mark.gradient is None:
                    continue  # dropped, or set by hand
                if now is not mark.gradient or write_count(local_tensor(now)) != mark.writes_to_gradient:
                    raise StepError(
                        f"a gradient of shape {tuple(now.shape)} was changed between backward() and step(), where it "
                        f"is this rank's own: clipped there, each rank's has another norm. {_FIX}; or change it in "
                        "pre_optimizer_step."
                    )

    def _look_at(self, optimizer: Optimizer) -> list[_Mark]:
        parameters = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) not in self._gradients.shared and p.requires_grad
        ]
        return [
            _Mark(p, p.grad, 0 if p.grad is None else write_count(local_tensor(p.grad)), write_count(p))
            for p in parameters[:: len(parameters) // _WATCHED + 1]
        ]
