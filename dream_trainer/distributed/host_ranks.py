"""The ranks of one host, which speak among themselves."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, cast

from dream_trainer.distributed.ranks import Ranks
from dream_trainer.distributed.world import World

if TYPE_CHECKING:
    import torch.distributed as dist


def ranks_of_host(world: World, host: int) -> list[int]:
    return [rank for rank in range(world.world_size) if world.host_of(rank) == host]


def on_host(world: World, beside: Ranks, *, timeout_seconds: float) -> Ranks:
    """Those of `beside` that are on this host, numbered from 0, for the same thread; every rank calls it."""
    if world.n_hosts == 1:
        return beside
    import torch.distributed as dist

    hosts = [ranks_of_host(world, host) for host in range(world.n_hosts)]
    group, _ = dist.new_subgroups_by_enumeration(hosts, timeout=timedelta(seconds=timeout_seconds), backend="gloo")
    own = hosts[world.host_number]
    return Ranks(own.index(world.rank), len(own), cast("dist.ProcessGroup", group))
