"""Weights that are real before they are sharded, made the same on all ranks.

Those on the meta device are the same bits everywhere by construction. Real ones come from the user's own code, which
may have drawn them from generators that nobody seeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import xxhash
from torch import Tensor

if TYPE_CHECKING:
    from dream_trainer.distributed.ranks import Ranks


def real_tensors(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of `models` that are not on the meta device, by name."""
    return {
        f"{prefix}.{name}": tensor
        for prefix, model in models.items()
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
        if not tensor.is_meta
    }


@torch.no_grad()
def make_equal(tensors: Mapping[str, Tensor], world: Ranks) -> list[str]:
    """Gives all ranks rank 0's values of those that differ, and returns their names; a collective.

    Args:
        tensors: By name; the same names, shapes and types on all ranks, and none sharded.
        world: The ranks.
    """
    if world.world_size == 1:
        return []
    digests = world.all_gather_object([digest_of(tensor) for tensor in tensors.values()])
    differ = [name for name, *values in zip(tensors, *digests, strict=True) if len(set(values)) > 1]
    for name in differ:
        values = tensors[name].cpu().contiguous()
        tensors[name].copy_(world.broadcast(values))
    return differ


def digest_of(tensor: Tensor) -> int:
    """Of a tensor's bytes, not of its shape."""
    return xxhash.xxh3_64_intdigest(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
