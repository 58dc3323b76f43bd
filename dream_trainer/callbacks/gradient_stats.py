"""GradientStats: how large the gradients of each part of the models are, now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.callbacks.tensor_stats import TensorStats, combined, group_of, local_sums, log_stats, together
from dream_trainer.checkpoint.model_state import parameter_fqns

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

OTHER = "other.parameters"  # name of what an optimizer trains and no model holds


class GradientStats(TensorStats):
    """Logs 2-norm, largest magnitude and share of zeros of gradients as `gradients/<group>/norm`, `max` and `zeros`.

    Gradients are those that the optimizers got: of the whole window, over all ranks, normalised and clipped; of one
    that steps several times in a window, its last. Groups share no parameter: `gradients/model` is of those that the
    model holds itself, outside of its submodules; `depth=0` gives one value for the whole model. Values do
    not depend on how parameters are sharded. A step that is due reads all gradients once, runs one collective and waits
    for the device; the others cost nothing.

    Args:
        every_n_steps: Optimizer steps between two looks.
        depth: Levels of submodules that are a group each, as in ModelSummary: 0 for whole models, None for each
            parameter on its own.
        histograms: Whether to log a histogram of each parameter's gradient too, as `gradients/<parameter>`; they are
            gathered for it, one at a time.
        name: What the metrics' names begin with.

    Raises:
        ConfigError: A number does not work.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        *,
        depth: int | None = 2,
        histograms: bool = False,
        name: str = "gradients",
    ) -> None:
        super().__init__(every_n_steps, name=name, depth=depth, histograms=histograms)
        # By optimizer: several may train parts of one group, and each counts once, also in a window that is run again.
        self._sums: dict[Optimizer, dict[str, Tensor]] = {}
        self._watched: AbstractTrainer | None = None

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        self._sums.clear()
        if trainer is not self._watched:
            self._watched = trainer
            trainer.accumulation_window.watch_skipped(lambda optimizer: self._sum_up(trainer, optimizer))

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Sums up this rank's part of the gradients, if it is time; they are gone when `step` returns."""
        self._sum_up(trainer, optimizer)

    def _sum_up(self, trainer: AbstractTrainer, optimizer: Optimizer) -> None:
        # Counters show completed work while training_step runs: this step is not counted yet.
        if (trainer.global_step + 1) % self.every_n_steps:
            return
        names = parameter_fqns(trainer.named_models())
        groups: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(parameter, OTHER)
            members = groups.setdefault(group_of(name, self.depth), [])
            if parameter.grad is not None:
                members.append((parameter, parameter.grad))
                if self.histograms:
                    trainer.log_histogram(f"{self.name}/{name}", parameter.grad)
        sums = local_sums(groups, trainer.world.world_size, trainer.world.parameter_device)
        self._sums[optimizer] = dict(zip(groups, sums, strict=True))

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if not self._sums:
            return
        rows: dict[str, Tensor] = {}
        for part in self._sums.values():
            for name, row in part.items():
                rows[name] = together(rows[name], row) if name in rows else row
        self._sums.clear()
        log_stats(trainer, self.name, combined(rows, torch.stack(list(rows.values())), trainer.world))


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
