"""The meshes on which a program fits, best first by what a step costs there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dream_trainer.planning.planned_world import PlanError
from dream_trainer.planning.rank_plan import RankJob, RankPlan, Tried, flags_of

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


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a step on the rank that takes longest, if computation and communication do not overlap."""

    compute: float
    """Matrix products and attention; in a pipeline also the wait for the first and the last micro-batch."""
    host: float
    """Sending to ranks of the same host."""
    network: float
    """Sending to ranks of other hosts."""
    samples: int
    """That all ranks train in the step."""

    @property
    def per_sample(self) -> float:
        return (self.compute + self.host + self.network) / self.samples


@dataclass(frozen=True, kw_only=True)
class Mesh(Tried):
    """A mesh that was planned; its plan is of the rank with the highest peak."""

    cost: Cost | None = None
    fits: bool = False


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


def search_meshes(
    given: RankPlan,
    job: RankJob,
    memory: int,
    rates: Rates,
    plan_of: Callable[[int, RankJob], tuple[RankPlan, RankJob]],
    tell: Callable[[str], None],
) -> list[Mesh]:
    """All meshes, those that fit first, the cheapest of them at the top.

    Args:
        given: A plan of the config as it is.
        job: The program and its world.
        memory: Bytes of a device.
        rates: What the cost is counted with.
        plan_of: Plans a rank, and returns the job of further ones.
        tell: Is told what is planned next.
    """
    found: list[Mesh] = []
    failed: dict[str, str] = {}  # by axis the error, with which greater sizes would fail too
    for sizes in meshes(job.world_size, job.ranks_per_host):
        axis = next((name for name in AXES if sizes[name] > 1), "")
        if axis in failed:
            continue
        for way in WAYS:
            values: dict[str, Any] = {
                name: size for name, size in sizes.items() if name not in AXES or size != given.mesh[AXES[name]]
            }
            if way != given.settings["activation_checkpointing"]:
                values["activation_checkpointing"] = way
            changes = {"device_parameters": values}
            flags = flags_of(changes)
            tell(flags)
            try:
                first, after = plan_of(0, replace(job, changes=changes, numbers=None))
                plans = [first]
                if axis == "pipeline_parallel":  # elsewhere ranks hold equal parts
                    plans.append(plan_of(job.world_size - 1, after)[0])
            except PlanError as error:
                if way == WAYS[0]:
                    failed[axis] = " ".join(str(error).split())
                    found.append(Mesh(change=axis, flags=flags, error=failed[axis]))
                break
            worst = max(plans, key=lambda each: each.peak)
            cost = max((cost_of(each, rates) for each in plans), key=lambda each: each.per_sample)
            found.append(Mesh(change=axis, flags=flags, plan=worst, cost=cost, fits=worst.peak <= memory))
            if found[-1].fits:  # more recomputation would only cost more
                break
    return sorted(found, key=lambda each: (not each.fits, each.cost is None, each.cost and each.cost.per_sample))


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
