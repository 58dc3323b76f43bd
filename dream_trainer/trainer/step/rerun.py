"""What a training step changes besides gradients: buffers, such as batch norm's statistics, and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dream_trainer.modules.metrics import MetricStates

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class MovedByForward:
    """A copy of all of it, to be restored before a window runs again: otherwise the window would count twice.

    Args:
        trainer: Between two windows.
    """

    def __init__(self, trainer: AbstractTrainer) -> None:
        self._buffers = [
            (buffer, buffer.detach().clone()) for model in trainer.named_models().values() for buffer in model.buffers()
        ]
        self._metrics = MetricStates(list(trainer.named_metrics().values()))

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores everything; may be called several times."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
        self._metrics.put_back()
