"""WeightStats: how large the weights of each part of the models are, now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn as nn
from torch import Tensor

from dream_trainer.callbacks.tensor_stats import TensorStats, combined, group_of, local_sums, log_stats
from dream_trainer.checkpoint.model_state import parameter_fqns

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class WeightStats(TensorStats):
    """Logs 2-norm, largest magnitude and share of zeros of parameters as `weights/<group>/norm`, `max` and `zeros`.

    Frozen parameters are among them. Groups share no parameter: `weights/model` is of those that the model holds
    itself, outside of its submodules; `depth=0` gives one value for the whole model. Values do not depend on
    how parameters are sharded. A step that is due reads all weights once, runs one collective and waits for the device;
    the others cost nothing.

    Args:
        every_n_steps: Optimizer steps between two looks.
        depth: Levels of submodules that are a group each, as in ModelSummary: 0 for whole models, None for each
            parameter on its own.
        histograms: Whether to log a histogram of each parameter too, as `weights/<parameter>`; they are gathered for
            it, one at a time.
        name: What the metrics' names begin with.

    Raises:
        ConfigError: A number does not work.
    """

    def __init__(
        self, every_n_steps: int = 100, *, depth: int | None = 2, histograms: bool = False, name: str = "weights"
    ) -> None:
        super().__init__(every_n_steps, name=name, depth=depth, histograms=histograms)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        """Logs the weights after the step, if it is time."""
        if trainer.global_step % self.every_n_steps:
            return
        groups: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
        for tensor, name in parameter_fqns(trainer.named_models()).items():
            if isinstance(tensor, nn.Parameter):
                groups.setdefault(group_of(name, self.depth), []).append((tensor, tensor.detach()))
                if self.histograms:
                    trainer.log_histogram(f"{self.name}/{name}", tensor.detach())
        sums = local_sums(groups, trainer.world.world_size, trainer.world.parameter_device)
        log_stats(trainer, self.name, combined(groups, sums, trainer.world))
