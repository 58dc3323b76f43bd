"""Running statistics of normalisation layers (batch norm), which each rank takes from its own samples in a forward.

They are averaged over the data-parallel ranks after each window, so that what is validated is what is saved and
exported, on whichever rank. The update of a running mean is linear: its average over ranks is the same however often
one averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import foreach_copy_
from dream_trainer.modules.mixture_of_experts import MoE

if TYPE_CHECKING:
    import torch.distributed as dist

_KEEP_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def norms_with_statistics(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers of `models` with running statistics of their rank's own; `nn.SyncBatchNorm`'s are common already."""
    parts = {id(part): part for model in models for part in model.modules()}.values()
    return [part for part in parts if isinstance(part, _KEEP_STATISTICS) and part.running_mean is not None]


def unread_in_training(module: nn.Module) -> frozenset[str]:
    """The buffers of a layer that its forward in training writes into and does not read."""
    if isinstance(module, (*_KEEP_STATISTICS, nn.SyncBatchNorm)):
        return frozenset(module._buffers)
    return frozenset({"loads"}) if isinstance(module, MoE) else frozenset()


def batch_norms(model: nn.Module) -> list[str]:
    """The names of the layers that normalise over samples in training; frozen ones are taken to be in evaluation."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    norms = [(name, part) for name, part in model.named_modules() if isinstance(part, kinds)]
    return [name for name, part in norms if part.weight is None or part.weight.requires_grad]


def average_statistics(norms: Sequence[nn.Module], group: dist.ProcessGroup | None) -> None:
    """Averages the statistics of `norms` over the ranks of `group` (None: all) on which they train, in one collective.

    A layer may train on some ranks and be in eval mode on others; where none trains it, it stays as it is.
    """
    import torch.distributed as dist

    buffers = [b for norm in norms for b in (norm.running_mean, norm.running_var) if isinstance(b, Tensor)]
    if not buffers:
        return
    flat = torch.cat([buffer.flatten() for buffer in buffers])
    layers = tuple([len(buffer) for buffer in buffers[::2]])
    trains = _flags(tuple([norm.training for norm in norms]), layers, flat.device, flat.dtype)
    sums = torch.stack((flat * trains, trains))
    dist.all_reduce(sums, group=group)
    averaged = torch.where(sums[1] > 0, sums[0] / sums[1], flat)
    parts = averaged.split([buffer.numel() for buffer in buffers])
    foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])


@lru_cache(maxsize=16)
def _flags(training: tuple[bool, ...], sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """For each element of the statistics whether its layer trains; made once, since making it waits for the device."""
    flags = [float(trains) for trains, size in zip(training, sizes, strict=True) for _ in range(2 * size)]
    return torch.tensor(flags, device=device, dtype=dtype)
