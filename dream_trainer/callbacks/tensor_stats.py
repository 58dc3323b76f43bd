"""Norm, largest magnitude and zeros of groups of tensors, over all ranks: what GradientStats and WeightStats log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.checks import check_boolean, check_integer
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.events.callback import LoggingCallback
from dream_trainer.trainer.step.gradients import copies_of

if TYPE_CHECKING:
    from dream_trainer.distributed.ranks import Ranks
    from dream_trainer.trainer.abstract import AbstractTrainer


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
