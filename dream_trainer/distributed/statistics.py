"""Running statistics of normalisation layers (batch norm), which each rank takes from its own samples in a forward.

They are averaged over the data-parallel ranks after each window, so that what is validated is what is saved and
exported, on whichever rank. The update of a running mean is linear: its average over ranks is the same however often
one averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.distributed.torch_compat import foreach_copy_

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World

_KEEP_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def norms_with_statistics(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers of `models` with running statistics of their rank's own; `nn.SyncBatchNorm`'s are common already."""
    parts = {id(part): part for model in models for part in model.modules()}.values()
    return [part for part in parts if isinstance(part, _KEEP_STATISTICS) and part.running_mean is not None]


def average_statistics(norms: Sequence[nn.Module], world: World) -> None:
    """Averages the statistics of those of `norms` that train, in one collective."""
    import torch.distributed as dist

    own = [b for norm in norms if norm.training for b in (norm.running_mean, norm.running_var)]
    buffers = [buffer for buffer in own if isinstance(buffer, Tensor)]
    if not buffers:
        return
    flat = torch.cat([buffer.flatten() for buffer in buffers])
    dist.all_reduce(flat, group=world.data_group)
    flat /= world.dp_size
    parts = flat.split([buffer.numel() for buffer in buffers])
    foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
