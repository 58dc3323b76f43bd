"""The mesh of experts: ranks that share experts are neighbours among those with different data.

pp             stages of a pipeline, whose experts are others
dp_replicate   copies of a rank's experts that gradients are averaged over; ranks that share layers have one each
dp_shard       ranks that share a copy (FSDP)
ep             ranks that have different experts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dream_trainer.distributed.world import World

EXPERT_MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "ep")


def expert_mesh_shape(replicate: int, shard: int, experts: int) -> tuple[int, int, int]:
    """Sizes of a stage's dimensions: shards are cut by experts first, and copies where nothing is sharded."""
    return (replicate, shard // experts, experts) if shard > 1 else (replicate // experts, 1, experts)


def lay_expert_mesh(world: World, experts: int) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    shape = expert_mesh_shape(world.parameter_shape.dp_replicate, world.parameter_shape.dp_shard, experts)
    ranks = torch.arange(world.world_size).view(world.stages, *shape, world.mesh_shape.tp)
    ranks = ranks.movedim(-1, 2).flatten(1, 2)
    mesh = DeviceMesh(world.device.type, ranks, mesh_dim_names=EXPERT_MESH_DIMS)
    world.further_groups.extend(mesh.get_all_groups())  # so that they take its time-outs
    return mesh
