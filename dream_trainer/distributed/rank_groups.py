"""Which ranks speak to each other beside the mesh: those of other data, those of one step, those in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    import torch.distributed as dist

    from dream_trainer.config.device_parameters import MeshShape


class RankGroups(NamedTuple):
    """Groups of this rank; None where it is all ranks, or there is no other.

    Attributes:
        data: Those that see different data, of this rank's pipeline stages.
        step: Those over which a step averages gradients.
        across_workers: Those that have this one's place in their groups of ranks that step on their own.
    """

    data: dist.ProcessGroup | None
    step: dist.ProcessGroup | None
    across_workers: dist.ProcessGroup | None


def make_groups(world_size: int, shape: MeshShape, workers: int) -> RankGroups:
    """Makes the groups of this rank; every rank calls it.

    Args:
        world_size: Number of ranks.
        shape: Of the mesh.
        workers: Number of groups of neighbouring ranks that step on their own.
    """
    ranks = list(range(world_size))
    of_stage = world_size // shape.pp
    stages = [ranks[first : first + of_stage] for first in range(0, world_size, of_stage)]
    same_data = [stage[place :: shape.tp] for stage in stages for place in range(shape.tp)]
    data = _own(same_data) if len(same_data) > 1 else None
    if workers == 1:
        return RankGroups(data, _own(stages) if shape.pp > 1 else None, None)
    size = world_size // workers
    within = [ranks[first : first + size] for first in range(0, world_size, size)]
    return RankGroups(data, _own(within), _own([ranks[place::size] for place in range(size)]))


def _own(groups: list[list[int]]) -> dist.ProcessGroup:
    import torch.distributed as dist

    group, _ = dist.new_subgroups_by_enumeration(groups)
    return cast("dist.ProcessGroup", group)
