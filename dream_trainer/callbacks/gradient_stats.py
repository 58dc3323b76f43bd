"""GradientStats and WeightStats: norm, largest magnitude and zeros of the parts of the models, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.checkpoint.model_state import parameter_fqns
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.config.parameter_class import NonNegativeInt, PositiveInt, check_fields
from dream_trainer.events.callback import LoggingCallback
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.step.gradients import copies_of

OTHER = "other.parameters"  # for optimized parameters that are in no model


@dataclass(eq=False, repr=False)
class TensorStats(LoggingCallback):
    """A callback that measures groups of tensors every n steps: an interface. Use `GradientStats` or `WeightStats`."""

    needs_whole_models: ClassVar[bool] = True

    every_n_steps: PositiveInt = 100
    _: KW_ONLY
    depth: NonNegativeInt | None = 2
    histograms: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.name)
        check_fields(self, TensorStats)

    @torch.no_grad()
    def _sums_of(
        self, trainer: AbstractTrainer, named: Iterable[tuple[str, nn.Parameter, Tensor | None]]
    ) -> dict[str, Tensor]:
        """This rank's sums of each group of parameters; of tensors that are None nothing but that there is a group."""
        world, sums = trainer.world, dict[str, Tensor]()
        for name, parameter, tensor in named:
            row = sums.setdefault(group_of(name, self.depth), no_sums(1, world.parameter_device)[0])
            if tensor is not None:
                add_sums(row, local_tensor(tensor), copies_of(parameter, world.world_size))
                if self.histograms:
                    trainer.log_histogram(f"{self.name}/{name}", tensor)
        return sums

    def _log(self, trainer: AbstractTrainer, sums: Mapping[str, Tensor]) -> None:
        """Logs norm, largest magnitude and share of zeros over all ranks; a collective, and waits for the device."""
        own = torch.stack(list(sums.values())) if sums else no_sums(0, trainer.world.parameter_device)
        rows = trainer.world.all_gather(own.cpu().double().flatten()).view(trainer.world.world_size, -1, 4)
        total, largest = rows.sum(0).tolist(), rows[:, :, 1].amax(0).tolist()
        for group, (squares, _, zeros, elements), max_abs in zip(sums, total, largest, strict=True):
            if elements:
                stats = {"norm": math.sqrt(squares), "max": max_abs, "zeros": zeros / elements}
                for kind, value in stats.items():
                    trainer.log(f"{self.name}/{group}/{kind}", value, weight=1.0, reduce="last")


def group_of(fqn: str, depth: int | None) -> str:
    """The group of a parameter: its module down to `depth` levels below the model; None is the parameter itself."""
    return fqn if depth is None else ".".join(fqn.split(".")[:-1][: depth + 1])


def no_sums(n_groups: int, device: torch.device) -> Tensor:
    """For each group the sum of squares, largest magnitude, zeros and elements: 0, in float64 where there is any."""
    return torch.zeros(n_groups, 4, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def add_sums(row: Tensor, tensor: Tensor, copies: int = 1) -> None:
    """Adds a plain tensor's sums to a group's, in place; each of its elements counts `1 / copies`."""
    if not tensor.numel():  # a rank may hold nothing of a small tensor
        return
    # A norm of half-precision values is not a half-precision number.
    norm = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    row[0] += norm.to(row.dtype).square() / copies
    row[1] = torch.maximum(row[1], torch.linalg.vector_norm(tensor, math.inf).to(row.dtype))
    row[2] += (tensor.numel() - tensor.count_nonzero()) / copies
    row[3] += tensor.numel() / copies


@dataclass(eq=False, repr=False)
class GradientStats(TensorStats):
    """Logs 2-norm, largest magnitude and share of zeros of gradients as `gradients/<group>/norm`, `max` and `zeros`.

    Gradients are those that the optimizers got: of the whole window, over all ranks, normalised and clipped; of one
    that steps several times in a window, its last. Groups share no parameter: `gradients/model` is of those that the
    model holds itself, outside its submodules; `depth=0` gives one value for the whole model. Values do
    not depend on how parameters are sharded. A step that is due reads all gradients once, runs one collective and waits
    for the device; the others cost nothing.

    Args:
        every_n_steps: Optimizer steps between two looks.
        depth: Levels of submodules that are a group each, as in ModelSummary: 0 for whole models, None for each
            parameter on its own.
        histograms: Whether to log a histogram of each parameter's gradient too, as `gradients/<parameter>`; they are
            gathered for it, one at a time.
        name: First part of the metrics' names.

    Raises:
        ConfigError: A number is invalid.
    """

    name: str = field(default="gradients", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._sums[optimizer] = self._sums_of(trainer, ((names.get(p, OTHER), p, p.grad) for p in parameters))

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if not self._sums:
            return
        sums: dict[str, Tensor] = {}
        for part in self._sums.values():
            for name, row in part.items():
                before = sums.get(name, torch.zeros_like(row))
                sums[name] = before + row
                sums[name][1] = torch.maximum(before[1], row[1])
        self._sums.clear()
        self._log(trainer, sums)


@dataclass(eq=False, repr=False)
class WeightStats(TensorStats):
    """Logs 2-norm, largest magnitude and share of zeros of parameters as `weights/<group>/norm`, `max` and `zeros`.

    Frozen parameters are among them. Groups, cost and arguments are as for `GradientStats`; histograms are of the
    parameters.
    """

    name: str = field(default="weights", kw_only=True)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if trainer.global_step % self.every_n_steps:
            return
        named = parameter_fqns(trainer.named_models()).items()
        of_parameters = ((name, p, p.detach()) for p, name in named if isinstance(p, nn.Parameter))
        self._log(trainer, self._sums_of(trainer, of_parameters))
