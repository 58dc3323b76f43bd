"""LearningRate: the rate that each optimizer step used, among the logged metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn as nn
from torch.optim import Optimizer

from dream_trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class LearningRate(Callback):
    """Logs the rate with which each parameter group was stepped: `lr`, or `lr/<optimizer>/<group>` where there are
    several groups.

    A group is called by its `"name"` if it has one, else by its number. The value logged at a step is the one that
    this step used, before the scheduler moved on; after a step that was skipped on the host there is none. Nothing
    waits for the device, also where rates are tensors.

    Args:
        name: What the metrics' names begin with.
    """

    def __init__(self, name: str = "lr") -> None:
        self.name = name
        self._names: dict[Optimizer, list[str]] = {}

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Logs the rates of one optimizer."""
        groups = optimizer.param_groups
        names = self._names.get(optimizer)
        if names is None or len(names) != len(groups):
            names = self._name_all(trainer)[optimizer]
        for name, group in zip(names, groups, strict=True):
            trainer.log(name, group["lr"], weight=1.0, reduce="last")

    def _name_all(self, trainer: AbstractTrainer) -> dict[Optimizer, list[str]]:
        optimizers = trainer.named_optimizers()
        is_only = sum(len(optimizer.param_groups) for optimizer in optimizers.values()) == 1
        self._names = {
            optimizer: [
                self.name if is_only else f"{self.name}/{name}/{group.get('name', index)}"
                for index, group in enumerate(optimizer.param_groups)
            ]
            for name, optimizer in optimizers.items()
        }
        return self._names
