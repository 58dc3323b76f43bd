"""What a training step changes besides gradients: buffers, such as batch norm's statistics, numbers, and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.modules.forward_state import ForwardState
from dream_trainer.modules.metrics import MetricStates

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class MovedByForward:
    """A copy of all of it, to be restored before a window runs again: otherwise the window would count twice.

    Args:
        trainer: Between two windows.
    """

    def __init__(self, trainer: AbstractTrainer) -> None:
        self._models = ForwardState(trainer.named_models().values())
        self._metrics = MetricStates(list(trainer.named_metrics().values()))

    def put_back(self) -> None:
        """Restores everything; may be called several times."""
        self._models.put_back()
        self._metrics.put_back()
