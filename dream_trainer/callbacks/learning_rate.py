"""LearningRate: the rate that each optimizer step used, among the logged metrics."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.errors import HookError
from dream_trainer.events.callback import LoggingCallback
from dream_trainer.trainer.abstract import AbstractTrainer


class _Curves(NamedTuple):
    n_groups: int
    names: list[str]  # one for all groups, or one for each
    is_shared: bool  # whether several groups share one


class LearningRate(LoggingCallback):
    """Logs the learning rate of each step: `lr`, or `lr/<optimizer>` if there are several optimizers.

    Groups of one optimizer with the same rate share a curve. If their rates differ, or from the step where they part,
    each group has its own, `lr/<optimizer>/<group>`, by its `"name"`, or by its number without one. Tensors only count
    as one rate if they are the same tensor, since comparing them would wait for the device.

    The value logged at a step is the one that this step used, before the scheduler moved on; after a step that was
    skipped on the host there is none. Nothing waits for the device.

    Args:
        name: First part of the metrics' names.
    """

    def __init__(self, name: str = "lr") -> None:
        super().__init__(name)
        self._curves: dict[Optimizer, _Curves] = {}

    def post_setup(self, trainer: AbstractTrainer) -> None:
        self._curves.clear()

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        curves = self._curves.get(optimizer)
        if curves is None or curves.n_groups != len(groups) or (curves.is_shared and not _have_one_rate(groups)):
            curves = self._curves[optimizer] = self._named(trainer, optimizer, curves)
        for index, name in enumerate(curves.names):  # a single name belongs to the first group
            trainer.log(name, groups[index]["lr"], weight=1.0, reduce="last")

    def _named(self, trainer: AbstractTrainer, optimizer: Optimizer, before: _Curves | None) -> _Curves:
        optimizers, groups = trainer.named_optimizers(), optimizer.param_groups
        name_of_optimizer = next((name for name, one in optimizers.items() if one is optimizer), None)
        if name_of_optimizer is None:
            raise HookError(
                f"an optimizer of type {type(optimizer).__name__} stepped that is not a public attribute of the "
                "trainer, so it has no name and is not saved either. Give it a public name, such as self.optimizer."
            )
        have_parted = before is not None and len(before.names) > 1
        if _have_one_rate(groups) and not have_parted:
            name = self.name if len(optimizers) == 1 else f"{self.name}/{name_of_optimizer}"
            return _Curves(len(groups), [name], is_shared=len(groups) > 1)
        labels = [str(group.get("name", index)) for index, group in enumerate(groups)]
        if len(set(labels)) < len(labels):
            labels = [f"{label}.{index}" for index, label in enumerate(labels)]
        return _Curves(len(groups), [f"{self.name}/{name_of_optimizer}/{label}" for label in labels], is_shared=False)


def _have_one_rate(groups: list[dict[str, Any]]) -> bool:
    rates = ((group["lr"], group.get("initial_lr")) for group in groups)
    return len(groups) == 1 or len({id(rate) if isinstance(rate, Tensor) else (rate, at) for rate, at in rates}) == 1
