"""LearningRate: the rate that each optimizer step used, among the logged metrics."""

from __future__ import annotations

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.errors import HookError
from dream_trainer.events.callback import LoggingCallback
from dream_trainer.trainer.abstract import AbstractTrainer


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
        self._names: dict[Optimizer, list[str]] = {}  # one for all groups, or one for each

    def post_setup(self, trainer: AbstractTrainer) -> None:
        self._names.clear()

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        groups, names = optimizer.param_groups, self._names.get(optimizer, [])
        is_shared = len(groups) == 1
        if not is_shared and len(names) < 2:  # groups that have parted stay apart
            # With the rates that they began from: groups that only meet are two.
            rates = ((group["lr"], group.get("initial_lr")) for group in groups)
            is_shared = len({id(rate) if isinstance(rate, Tensor) else (rate, at) for rate, at in rates}) == 1
        if len(names) != (1 if is_shared else len(groups)):
            names = self._names[optimizer] = self._named(trainer, optimizer, is_shared=is_shared)
        for index, name in enumerate(names):  # a single name belongs to the first group
            trainer.log(name, groups[index]["lr"], weight=1.0, reduce="last")

    def _named(self, trainer: AbstractTrainer, optimizer: Optimizer, *, is_shared: bool) -> list[str]:
        optimizers = trainer.named_optimizers()
        name_of_optimizer = next((name for name, one in optimizers.items() if one is optimizer), None)
        if name_of_optimizer is None:
            raise HookError(
                f"an optimizer of type {type(optimizer).__name__} stepped that is not a public attribute of the "
                "trainer, so it has no name and is not saved either. Give it a public name, such as self.optimizer."
            )
        if is_shared:
            return [self.name if len(optimizers) == 1 else f"{self.name}/{name_of_optimizer}"]
        labels = [str(group.get("name", index)) for index, group in enumerate(optimizer.param_groups)]
        if len(set(labels)) < len(labels):
            labels = [f"{label}.{index}" for index, label in enumerate(labels)]
        return [f"{self.name}/{name_of_optimizer}/{label}" for label in labels]
