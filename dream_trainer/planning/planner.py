"""Plans of a program on many ranks: which rank needs the most memory, and what would make that fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import cattrs

from dream_trainer.checks import refuse
from dream_trainer.planning.planned_world import PlanError
from dream_trainer.planning.rank_plan import Changes, RankJob, RankPlan, Tried, plan_rank, tried
from dream_trainer.planning.search import WAYS, Rates, search_meshes
from dream_trainer.testing.program import Program
from dream_trainer.testing.rank_process import preload

MOST_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """A program on a number of ranks."""

    worst: RankPlan
    ranks: dict[int, int]
    """The peak of each planned rank."""
    memory: int | None = None
    """Bytes of a device; None if nothing was asked."""
    tried: list[Tried] = field(default_factory=list)
    """What was tried where it does not fit."""
    meshes: list[Tried] = field(default_factory=list)
    """What a search has planned: those that fit first, the cheapest of them at the top."""
    rates: Rates = field(default_factory=Rates)
    """What the costs of meshes are counted with."""

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None else self.worst.peak <= self.memory

    @property
    def answer(self) -> Tried | None:
        """The smallest change with which it fits."""
        return next((each for each in self.tried if each.fits(self.memory)), None)


def make_plan(
    program: Program,
    world_size: int,
    *,
    rank: int | None = None,
    ranks_per_host: int = 8,
    memory: int | None = None,
    rates: tuple[float, float, float] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> MeshPlan:
    """Plans in processes forked from this one, which should have no threads; `plan` can be called anywhere.

    With `rates`, searches meshes instead of changes that would fit.
    """
    if rates is not None:
        refuse(memory is None, "--search needs the memory of a device. Write it too, such as --gpu-memory 80GiB.")
        refuse(min(rates) <= 0, f"--rates {' '.join(map(str, rates))}: a rate is not above 0.")
    plans, job = plan_ranks(program, world_size, rank=rank, ranks_per_host=ranks_per_host, tell=tell)
    worst = max(plans.values(), key=lambda each: each.peak)
    found = MeshPlan(worst=worst, ranks={number: each.peak for number, each in plans.items()}, memory=memory)
    if rates is not None and memory is not None:
        of_device = Rates(*rates)
        return replace(found, rates=of_device, meshes=search_meshes(worst, job, memory, of_device, tell))
    if found.fits is not False:
        return found
    return replace(found, tried=list(_tried(found, replace(job, rank=worst.rank), tell)))


def plan_ranks(
    program: Program,
    world_size: int,
    *,
    rank: int | None = None,
    ranks_per_host: int = 8,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[dict[int, RankPlan], RankJob]:
    """The plans of `rank`, or of the first and the last one, and the job of further ones."""
    refuse(not 0 < world_size <= MOST_RANKS, f"--world {world_size} is not between 1 and {MOST_RANKS} ranks.")
    refuse(rank is not None and not 0 <= rank < world_size, f"--rank {rank} is none of the {world_size} ranks.")
    preload()  # what each forked process needs
    job = RankJob(program=program, rank=0, world_size=world_size, ranks_per_host=ranks_per_host)
    plans: dict[int, RankPlan] = {}
    for number in dict.fromkeys([0, world_size - 1] if rank is None else [rank]):
        tell(f"rank {number} of {world_size}")
        plans[number], job = plan_rank(number, job)
    return plans, job


def _tried(plan: MeshPlan, job: RankJob, tell: Callable[[str], None]) -> Iterator[Tried]:
    """One change after the other, from the one that costs least, until it fits; in the end all of them."""
    together: dict[str, dict[str, Any]] = {}
    recomputing, sharded, accumulating, in_parts = _changes(plan.worst)
    for kind in (recomputing, sharded, accumulating, in_parts):
        last: Changes = {}
        for name, changes in kind:
            tell(f"rank {job.rank} with {name}")
            found = tried(name, changes, job)
            yield found
            if found.fits(plan.memory):
                return
            last = last if found.plan is None else changes
        for group, values in last.items() if kind is not in_parts else ():
            together.setdefault(group, {}).update(values)
    if together:
        tell("all of these")
        yield tried("recomputation, shards and micro-batches together", together, job)


def _changes(plan: RankPlan) -> tuple[list[tuple[str, Changes]], ...]:
    """Recomputation, more shards, smaller micro-batches, and layers over ranks; of each the smallest change first."""
    ways = WAYS[WAYS.index(plan.settings["activation_checkpointing"]) + 1 :]
    copies, shards = plan.mesh["dp_replicate"], plan.mesh["dp_shard"]
    more = [n for n in range(2, copies + 1) if copies % n == 0 and (n & (n - 1) == 0 or n == copies)]
    size, times = plan.settings["train_batch_size"], 2
    accumulating: list[tuple[str, Changes]] = []
    while size % times == 0 and size >= times:
        values: dict[str, Any] = {"train_batch_size": size // times}
        if plan.settings["global_batch_size"] is None:
            values["gradient_accumulation_steps"] = plan.settings["accumulation"] * times
        if shards > 1:  # by default gradients would be whole between micro-batches
            values["sync_policy"] = "reduce_scatter_each"
        accumulating.append((f"micro-batches of {size // times}", {"training_parameters": values}))
        times *= 2
    in_parts: list[tuple[str, Changes]] = []
    for ranks in (2, 4, 8) if plan.mesh["tp"] == 1 else ():
        name = "dp_shard" if shards % ranks == 0 else "dp_replicate"
        if plan.mesh[name] % ranks == 0:
            sizes = {"dp_replicate": copies, "dp_shard": shards, "tensor_parallel": ranks}
            changes = {"device_parameters": sizes | {name: plan.mesh[name] // ranks}}
            in_parts.append((f"layers over {ranks} ranks", changes))
    return (
        [(f"{way} recomputation", {"device_parameters": {"activation_checkpointing": way}}) for way in ways],
        [
            (
                f"shards over {shards * n} ranks",
                {"device_parameters": {"dp_replicate": copies // n, "dp_shard": shards * n}},
            )
            for n in more
        ],
        accumulating,
        in_parts,
    )


def plan(
    program: str,
    *overrides: str,
    world: int,
    rank: int | None = None,
    gpu_memory: str | None = None,
    ranks_per_host: int = 8,
    search: bool = False,
) -> MeshPlan:
    """Plans a program's trainer on many ranks, in one process without a device.

    Args:
        program: "PROGRAM" or "PROGRAM:NAME", as `dream-trainer plan` takes it.
        *overrides: Arguments that change the program's config.
        world: Number of ranks, up to 4,096.
        rank: The one to plan. None plans the first and the last.
        gpu_memory: Memory of a device, such as "80GiB". If a rank does not fit, changes are tried.
        ranks_per_host: Neighbouring ranks on one host.
        search: Whether to plan meshes and recomputation too, see `MeshPlan.meshes`. Needs `gpu_memory`.

    Raises:
        PlanError: The program cannot be planned, or has an error that a run would have too.

    Example:
        ```python
        from dream_trainer.planning import plan

        def test_it_fits():
            assert plan("train.py", world=64, gpu_memory="80GiB").fits
        ```
    """
    options = [f"--world={world}", f"--ranks-per-host={ranks_per_host}", "--json"]
    options += [] if rank is None else [f"--rank={rank}"]
    options += ["--search"] if search else []
    options += [] if gpu_memory is None else [f"--gpu-memory={gpu_memory}"]
    words = [sys.executable, "-m", "dream_trainer", "plan", program, *options, *overrides]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        values = json.loads(run.stdout)
    except ValueError:
        raise PlanError(run.stderr.strip().removeprefix("error: ")) from None
    return cattrs.structure(values, MeshPlan)
