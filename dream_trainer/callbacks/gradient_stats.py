"""GradientStats and WeightStats: norm, largest magnitude and zeros of the parts of the models, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.checkpoint.model_state import parameter_fqns
from dream_trainer.checks import check_boolean, check_integer
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.events.callback import LoggingCallback
from dream_trainer.trainer.step.gradients import copies_of

if TYPE_CHECKING:
    from dream_trainer.distributed.ranks import Ranks
    from dream_trainer.trainer.abstract import AbstractTrainer

OTHER = "other.parameters"  # name of what an optimizer trains and no model holds


class Stats(NamedTuple):
    """Of one group of tensors, each element counted once."""

    norm: float  # 2-norm
    max_abs: float  # largest magnitude
    zero_fraction: float  # share of the elements that are zero


class TensorStats(LoggingCallback):
    """A callback that looks at groups of tensors every n steps: an interface. Use `GradientStats` or `WeightStats`."""

    needs_whole_models: ClassVar[bool] = True

    def __init__(self, every_n_steps: int, *, name: str, depth: int | None, histograms: bool) -> None:
        super().__init__(name)
        check_integer("every_n_steps", every_n_steps, minimum=1)
        if depth is not None:
            check_integer("depth", depth, minimum=0)
        check_boolean("histograms", histograms)
        self.every_n_steps = every_n_steps
        self.depth = depth
        self.histograms = histograms


def group_of(fqn: str, depth: int | None) -> str:
    """The group of a parameter: its module down to `depth` levels below the model; None is the parameter alone."""
    return fqn if depth is None else ".".join(fqn.split(".")[:-1][: depth + 1])


@torch.no_grad()
def local_sums(
    groups: Mapping[str, Iterable[tuple[nn.Parameter, Tensor]]], world_size: int, device: torch.device
) -> Tensor:
    """This rank's sum of squares, largest magnitude, zeros and elements by group: shape `[n_groups, 4]`."""
    sums = no_sums(len(groups), device)
    for row, members in zip(sums, groups.values(), strict=True):
        for parameter, tensor in members:
            add_sums(row, local_tensor(tensor), copies_of(parameter, world_size))
    return sums


def no_sums(n_groups: int, device: torch.device) -> Tensor:
    """Zeros of shape `[n_groups, 4]`, in float64 where the device has it."""
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


def together(one: Tensor, other: Tensor) -> Tensor:
    """The sums of a group whose members were summed up in two parts; each of shape `[4]`, as `local_sums` has them."""
    both = one + other
    both[1] = torch.maximum(one[1], other[1])
    return both


def combined(names: Iterable[str], sums: Tensor, world: Ranks) -> dict[str, Stats]:
    """The groups' stats over all ranks, without empty ones; a collective, and waits for the device."""
    rows = world.all_gather(sums.cpu().double().flatten()).view(world.world_size, -1, 4)
    total, largest = rows.sum(0).tolist(), rows[:, :, 1].amax(0).tolist()
    return {
        name: Stats(math.sqrt(squares), max_abs, zeros / elements)
        for name, (squares, _, zeros, elements), max_abs in zip(names, total, largest, strict=True)
        if elements
    }


def log_stats(trainer: AbstractTrainer, prefix: str, found: Mapping[str, Stats]) -> None:
    for group, stats in found.items():
        trainer.log(f"{prefix}/{group}/norm", stats.norm, weight=1.0, reduce="last")
        trainer.log(f"{prefix}/{group}/max", stats.max_abs, weight=1.0, reduce="last")
        trainer.log(f"{prefix}/{group}/zeros", stats.zero_fraction, weight=1.0, reduce="last")


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
        self, every_n_steps: int = 100, *, depth: int | None = 2, histograms: bool = False, name: str = "gradients"
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
