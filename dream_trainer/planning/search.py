"""The meshes on which a program fits, best first by what a step costs there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dream_trainer.planning.rank_plan import Cost, RankJob, RankPlan, Tried, flags_of, tried

AXES = {"tensor_parallel": "tp", "context_parallel": "cp", "pipeline_parallel": "pp"}  # with their dimensions
WAYS = ("none", "selective", "full")


@dataclass(frozen=True)
class Rates:
    """What a device reaches in training, not its peak."""

    tflops: float = 400.0
    """10^12 operations per second in matrix products and attention."""
    host_gb: float = 300.0
    """10^9 bytes per second that a rank sends to ranks of its host."""
    network_gb: float = 40.0
    """10^9 bytes per second that a rank sends to ranks of other hosts."""


def meshes(world_size: int, ranks_per_host: int) -> Iterator[dict[str, int]]:
    """Replicas and shards, each alone and with one further axis of up to 8 ranks of a host."""
    for axis in (None, *AXES):
        for size in (1,) if axis is None else (2, 4, 8):
            if world_size % size or size > ranks_per_host:
                continue
            rest = world_size // size
            for shards in sorted({rest, _shards_on_a_host(rest, ranks_per_host // size), 1}, reverse=True):
                sizes = {"dp_replicate": rest // shards, "dp_shard": shards, **dict.fromkeys(AXES, 1)}
                yield sizes if axis is None else {**sizes, axis: size}


def _shards_on_a_host(ranks: int, of_a_host: int) -> int:
    return max(n for n in range(1, max(1, of_a_host) + 1) if ranks % n == 0)


def search_meshes(given: RankPlan, job: RankJob, memory: int, rates: Rates, tell: Callable[[str], None]) -> list[Tried]:
    """All meshes, those that fit first, the cheapest of them at the top; `given` is the config's as it is."""
    found: list[Tried] = []
    failed: set[str] = set()  # axes with which greater sizes would fail too
    for sizes in meshes(job.world_size, job.ranks_per_host):
        axis = next((name for name in AXES if sizes[name] > 1), "")
        for way in WAYS if axis not in failed else ():
            values: dict[str, Any] = {
                name: size for name, size in sizes.items() if name not in AXES or size != given.mesh[AXES[name]]
            }
            if way != given.settings["activation_checkpointing"]:
                values["activation_checkpointing"] = way
            changes = {"device_parameters": values}
            tell(flags_of(changes))
            mesh = tried(axis, changes, replace(job, rank=0), partial(cost_of, rates=rates))
            if mesh.plan is None and way != WAYS[0]:
                break
            found.append(mesh)
            if mesh.plan is None:
                failed.add(axis)
            if mesh.plan is None or mesh.fits(memory):  # more recomputation would only cost more
                break
    return sorted(found, key=lambda each: (not each.fits(memory), each.cost.per_sample if each.cost else math.inf))


def cost_of(plan: RankPlan, rates: Rates) -> Cost:
    """What the operations and the bytes of a plan take."""
    settings, stages = plan.settings, plan.mesh["pp"]
    replicas = plan.mesh["dp_replicate"] * plan.mesh["dp_shard"]
    waits = 1 + (stages - 1) / settings["parts"]
    sent = {True: 0, False: 0}
    for each in plan.traffic:
        sent[each.hosts == 1] += each.sent
    return Cost(
        compute=plan.flops / (rates.tflops * 1e12) * waits,
        host=sent[True] / (rates.host_gb * 1e9),
        network=sent[False] / (rates.network_gb * 1e9),
        samples=settings["train_batch_size"] * settings["accumulation"] * replicas,
    )
