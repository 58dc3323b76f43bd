"""Plans of a program on many ranks: which rank needs the most memory, and what would make that fit."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import cattrs

from dream_trainer.checks import refuse
from dream_trainer.planning.planned_world import NeedsFirstStageError, PlanError
from dream_trainer.planning.rank_plan import (
    Changes,
    RankJob,
    RankPlan,
    Tried,
    flags_of,
    plan_rank,
)
from dream_trainer.planning.search import Mesh, Rates, search_meshes
from dream_trainer.testing.program import Program

MOST_RANKS = 4096
_UNITS = {"": 2**30, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "TiB": 2**40, "TB": 10**12}


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
    meshes: list[Mesh] = field(default_factory=list)
    """What a search has planned: those that fit first, the cheapest of them at the top."""
    rates: Rates = field(default_factory=Rates)
    """What the costs of meshes are counted with."""

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None else self.worst.peak <= self.memory

    @property
    def answer(self) -> Tried | None:
        """The smallest change with which it fits."""
        fitting = (each for each in self.tried if each.plan is not None and each.plan.peak <= (self.memory or 0))
        return next(fitting, None)


def memory_of(text: str) -> int:
    """`"80GiB"` as bytes; GiB without a unit."""
    number = text.strip().rstrip("BGMTib")
    unit = text.strip()[len(number) :]
    try:
        n_bytes = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        n_bytes = 0
    refuse(n_bytes <= 0, f"--gpu-memory {text!r} is no size. Write a number and a unit: 80GiB.")
    return int(n_bytes)


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
    plans, job = _plans(program, world_size, rank=rank, ranks_per_host=ranks_per_host, tell=tell)
    worst = max(plans.values(), key=lambda each: each.peak)
    found = MeshPlan(worst=worst, ranks={number: each.peak for number, each in plans.items()}, memory=memory)
    if rates is not None and memory is not None:
        of_device = Rates(*rates)
        return replace(found, rates=of_device, meshes=search_meshes(worst, job, memory, of_device, _plan_of, tell))
    if found.fits is not False:
        return found
    return replace(found, tried=list(_tried(found, replace(job, rank=worst.rank), tell)))


def make_plans(program: Program, world_size: int) -> dict[int, RankPlan]:
    """Those of the first and the last rank."""
    return _plans(program, world_size, rank=None, ranks_per_host=8, tell=lambda line: None)[0]


def _plans(
    program: Program, world_size: int, *, rank: int | None, ranks_per_host: int, tell: Callable[[str], None]
) -> tuple[dict[int, RankPlan], RankJob]:
    """By rank, and the job of further ones."""
    refuse(not 0 < world_size <= MOST_RANKS, f"--world {world_size} is not between 1 and {MOST_RANKS} ranks.")
    refuse(rank is not None and not 0 <= rank < world_size, f"--rank {rank} is none of the {world_size} ranks.")
    _preload()
    job = RankJob(program=program, rank=0, world_size=world_size, ranks_per_host=ranks_per_host)
    plans: dict[int, RankPlan] = {}
    for number in dict.fromkeys([0, world_size - 1] if rank is None else [rank]):
        tell(f"rank {number} of {world_size}")
        plans[number], job = _plan_of(number, job)
    return plans, job


def _plan_of(rank: int, job: RankJob) -> tuple[RankPlan, RankJob]:
    """Also the job of further ranks, which knows what stages of a pipeline give one another."""
    try:
        found = plan_rank(replace(job, rank=rank))
    except NeedsFirstStageError:
        job = replace(job, numbers=plan_rank(replace(job, rank=0)).numbers)
        found = plan_rank(replace(job, rank=rank))
    return found, replace(job, numbers=job.numbers or found.numbers)


def _tried(plan: MeshPlan, job: RankJob, tell: Callable[[str], None]) -> Iterator[Tried]:
    """One change after the other, from the one that costs least, until it fits; in the end all of them."""
    together: dict[str, dict[str, Any]] = {}
    last: dict[str, dict[str, Any]] = {}
    for kind in _KINDS:
        for name, changes in kind(plan.worst):
            tell(f"rank {job.rank} with {name}")
            found = _try(name, changes, job)
            yield found
            if found.plan is not None:
                if found.plan.peak <= (plan.memory or 0):
                    return
                last = {group: dict(values) for group, values in changes.items()}
        if kind is not _tensor_parallel:
            for group, values in last.items():
                together.setdefault(group, {}).update(values)
        last = {}
    if together:
        tell("all of these")
        yield _try("recomputation, shards and micro-batches together", together, job)


def _try(change: str, changes: Changes, job: RankJob) -> Tried:
    flags = flags_of(changes)
    try:
        found, _ = _plan_of(job.rank, replace(job, changes=changes, numbers=None))
        return Tried(change=change, flags=flags, plan=found)
    except PlanError as error:
        return Tried(change=change, flags=flags, error=" ".join(str(error).split()))


_Change = tuple[str, Changes]


def _recompute(plan: RankPlan) -> Iterator[_Change]:
    ways = ("none", "selective", "full")
    for way in ways[ways.index(plan.settings["activation_checkpointing"]) + 1 :]:
        yield f"{way} recomputation", {"device_parameters": {"activation_checkpointing": way}}


def _shard(plan: RankPlan) -> Iterator[_Change]:
    copies, shards = plan.mesh["dp_replicate"], plan.mesh["dp_shard"]
    for times in (n for n in range(2, copies + 1) if copies % n == 0 and (n & (n - 1) == 0 or n == copies)):
        sizes = {"dp_replicate": copies // times, "dp_shard": shards * times}
        yield f"shards over {shards * times} ranks", {"device_parameters": sizes}


def _accumulate(plan: RankPlan) -> Iterator[_Change]:
    size, times = plan.settings["train_batch_size"], 2
    while size % times == 0 and size >= times:
        values: dict[str, Any] = {"train_batch_size": size // times}
        if plan.settings["global_batch_size"] is None:
            values["gradient_accumulation_steps"] = plan.settings["accumulation"] * times
        if plan.mesh["dp_shard"] > 1:  # by default gradients would be whole between micro-batches
            values["sync_policy"] = "reduce_scatter_each"
        yield f"micro-batches of {size // times}", {"training_parameters": values}
        times *= 2


def _tensor_parallel(plan: RankPlan) -> Iterator[_Change]:
    if plan.mesh["tp"] > 1:
        return
    for ranks in (2, 4, 8):
        name = "dp_shard" if plan.mesh["dp_shard"] % ranks == 0 else "dp_replicate"
        if plan.mesh[name] % ranks == 0:
            other = {each: plan.mesh[each] for each in ("dp_replicate", "dp_shard")}
            sizes = {**other, name: plan.mesh[name] // ranks, "tensor_parallel": ranks}
            yield f"layers over {ranks} ranks", {"device_parameters": sizes}


_KINDS: tuple[Callable[[RankPlan], Iterator[_Change]], ...] = (_recompute, _shard, _accumulate, _tensor_parallel)


def _preload() -> None:
    """What each forked process needs."""
    from dream_trainer.testing.rank_process import PRELOADED

    for name in (*PRELOADED, "dream_trainer.planning.planned_trainer"):
        importlib.import_module(name)


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
