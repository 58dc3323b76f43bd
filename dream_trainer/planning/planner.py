"""Plans of a program on many ranks: which rank needs the most memory, what would make that fit, and the report of
it."""

from __future__ import annotations

import math
import os
import pickle
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from torch.distributions import Distribution

from dream_trainer.checks import refuse
from dream_trainer.errors import ConfigError
from dream_trainer.planning.planned_trainer import Changes, PlanError, PlannedTrainer, RankJob, RankPlan
from dream_trainer.screen import format_bytes, show
from dream_trainer.testing.checked_runs import fork
from dream_trainer.testing.program import Program, apart, become_rank, preload
from dream_trainer.weights.weight_files import parse_size


@dataclass(frozen=True)
class Rates:
    """What a device reaches in training, not its peak."""

    tflops: float = 400.0  # 10^12 operations per second in matrix products and attention
    host_gb: float = 300.0  # 10^9 bytes per second that a rank sends to ranks of its host
    network_gb: float = 40.0  # and to ranks of other hosts


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a step on the rank that takes longest, if computation and communication do not overlap."""

    compute: float  # matrix products and attention; in a pipeline also the wait for the first and last micro-batch
    host: float  # sending to ranks of the same host
    network: float  # sending to ranks of other hosts
    samples: int  # that all ranks train in the step

    @property
    def per_sample(self) -> float:
        return (self.compute + self.host + self.network) / self.samples


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change of the config, and the rank with the highest peak with it."""

    change: str
    flags: str  # as they are written on the command line
    plan: RankPlan | None = None  # None: it cannot be planned
    error: str = ""
    cost: Cost | None = None  # of a mesh that a search has planned

    def fits(self, memory: int | None) -> bool:
        return self.plan is not None and self.plan.peak <= (memory or 0)


def flags_of(changes: Changes) -> str:
    return " ".join(f"--{name.replace('_', '-')}={value}" for name, value in changes.items())


def tried(change: str, job: RankJob, rates: Rates | None = None) -> Tried:
    """The plan of a changed rank; with `rates` its cost, which in a pipeline is that of the first or last rank."""
    flags = flags_of(job.changes)
    try:
        plans = [plan_rank(job)]
        if rates is not None and plans[0].mesh["pp"] > 1:  # elsewhere ranks hold equal parts
            plans.append(plan_rank(replace(job, rank=job.world_size - 1), plans[0]))
    except PlanError as error:
        return Tried(change=change, flags=flags, error=" ".join(str(error).split()))
    costs = [] if rates is None else [_cost_of(each, rates) for each in plans]
    cost = max(costs, key=lambda each: each.per_sample, default=None)
    return Tried(change=change, flags=flags, plan=max(plans, key=lambda each: each.peak), cost=cost)


def plan_rank(job: RankJob, first: RankPlan | None = None) -> RankPlan:
    """Plans it in a forked process; before it the first rank, since a stage of a pipeline has to know what it gets."""
    if first is None and job.rank > 0:
        first = plan_rank(replace(job, rank=0))
    job = replace(job, numbers=None if first is None else first.numbers)
    if sys.stderr.isatty():
        show(f"planning rank {job.rank} of {job.world_size} ... {flags_of(job.changes)}", sys.stderr)
    with tempfile.TemporaryDirectory(prefix="dream-trainer-plan-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        child = fork(scratch, job.rank, partial(_run, job, scratch))
        try:
            os.waitpid(child, 0)
        finally:
            with suppress(ProcessLookupError):  # also its loaders' workers; and itself after Ctrl-C
                os.killpg(child, signal.SIGKILL)
        found, failed = scratch / "found", scratch / f"error_{job.rank}"
        if found.exists():
            return cast(RankPlan, pickle.loads(found.read_bytes()))
        if failed.exists():
            raise PlanError(pickle.loads(failed.read_bytes())["text"])
        said = re.sub("[╭╮╰╯│─]", " ", (scratch / f"output_{job.rank}").read_text(errors="replace"))  # a parser's frame
        said = " ".join(said.split()).removeprefix("error: ")[-700:]
        raise PlanError(said or f"the process of rank {job.rank} has ended without a plan.")


def _run(job: RankJob, scratch: Path) -> None:
    Distribution.set_default_validate_args(False)  # its checks look at values
    become_rank(job.rank, job.world_size, min(job.ranks_per_host, job.world_size))
    job.program.run(PlannedTrainer, _job=job, _scratch=str(scratch))


MOST_RANKS = 4096
AXES = {"tensor_parallel": "tp", "context_parallel": "cp", "pipeline_parallel": "pp"}  # with their dimensions
WAYS = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """A program on a number of ranks."""

    worst: RankPlan
    ranks: dict[int, int]  # the peak of each planned rank
    memory: int | None = None  # bytes of a device; None if nothing was asked
    tried: list[Tried] = field(default_factory=list)  # changes that were tried for a rank that does not fit
    meshes: list[Tried] = field(default_factory=list)  # of a search: those that fit first, the cheapest at the top
    rates: Rates = field(default_factory=Rates)  # rates for the costs of meshes

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None else self.worst.peak <= self.memory

    @property
    def answer(self) -> Tried | None:
        """The smallest change with which it fits."""
        return next((each for each in self.tried if each.fits(self.memory)), None)


def make_plan(job: RankJob, rank: int | None, memory: int | None, rates: Rates | None) -> MeshPlan:
    """Plans in processes forked from this one, which should have no threads; with `rates`, searches meshes."""
    if rates is not None:
        refuse(memory is None, "--search needs the memory of a device. Write it too, such as --gpu-memory 80GiB.")
        given = vars(rates).values()
        refuse(min(given) <= 0, f"--rates {' '.join(map(str, given))}: a rate is not above 0.")
    plans = plan_ranks(job, rank)
    worst = max(plans.values(), key=lambda each: each.peak)
    found = MeshPlan(worst=worst, ranks={number: each.peak for number, each in plans.items()}, memory=memory)
    if rates is not None and memory is not None:
        return replace(found, rates=rates, meshes=_searched(worst, job, memory, rates))
    return replace(found, tried=[*_tried(found, replace(job, rank=worst.rank))] if found.fits is False else [])


def plan_ranks(job: RankJob, rank: int | None = None) -> dict[int, RankPlan]:
    """The plans of `rank`, or of the first and the last one."""
    size, plans = job.world_size, dict[int, RankPlan]()
    refuse(not 0 < size <= MOST_RANKS, f"--world {size} is not between 1 and {MOST_RANKS} ranks.")
    refuse(rank is not None and not 0 <= rank < size, f"--rank {rank} is none of the {size} ranks.")
    preload()
    for number in dict.fromkeys([0, size - 1] if rank is None else [rank]):
        plans[number] = plan_rank(replace(job, rank=number), plans.get(0))
    return plans


def _tried(plan: MeshPlan, job: RankJob) -> Iterator[Tried]:
    """One change after the other, from the one that costs least, until it fits; in the end all of them."""
    together: dict[str, Any] = {}
    *kinds, in_parts = _changes(plan.worst)
    for kind in (*kinds, in_parts):
        last: Changes = {}  # that can be planned
        for name, changes in kind.items():
            found = tried(name, replace(job, changes=changes))
            yield found
            if found.fits(plan.memory):
                return
            last = last if found.plan is None else changes
        together |= {} if kind is in_parts else last
    if together:
        yield tried("recomputation, shards and micro-batches together", replace(job, changes=together))


def _changes(plan: RankPlan) -> Iterator[Mapping[str, Changes]]:
    """Recomputation, more shards, smaller micro-batches, and layers over ranks; of each the smallest change first."""
    mesh, settings = plan.mesh, plan.settings
    copies, shards, size = mesh["dp_replicate"], mesh["dp_shard"], settings["train_batch_size"]
    ways = WAYS[WAYS.index(settings["activation_checkpointing"]) + 1 :]
    yield {f"{way} recomputation": {"device.activation_checkpointing": way} for way in ways}
    yield {
        f"shards over {shards * n} ranks": {"device.dp_replicate": copies // n, "device.dp_shard": shards * n}
        for n in range(2, copies + 1)
        if copies % n == 0 and (n & (n - 1) == 0 or n == copies)
    }
    also: dict[str, Any] = {"training.sync_policy": "reduce_scatter_each"} if shards > 1 else {}
    accumulating, times = {}, 2  # by default gradients of shards would be whole between micro-batches
    while size % times == 0:
        if settings["global_batch_size"] is None:
            also = {"training.gradient_accumulation_steps": settings["accumulation"] * times} | also
        accumulating[f"micro-batches of {size // times}"] = {"training.train_batch_size": size // times} | also
        times *= 2
    yield accumulating
    in_parts = {}
    for ranks in (2, 4, 8) if mesh["tp"] == 1 else ():
        cut = "dp_shard" if shards % ranks == 0 else "dp_replicate"
        if mesh[cut] % ranks == 0:
            sizes = {"dp_replicate": copies, "dp_shard": shards, "tensor_parallel": ranks, cut: mesh[cut] // ranks}
            in_parts[f"layers over {ranks} ranks"] = {f"device.{name}": n for name, n in sizes.items()}
    yield in_parts


# -- a search: the meshes on which a program fits, best first by what a step costs there


def _meshes(world_size: int, ranks_per_host: int) -> Iterator[dict[str, int]]:
    """Replicas and shards, each alone and with one further axis of up to 8 ranks of a host."""
    for axis, size in (("tensor_parallel", 1), *((axis, size) for axis in AXES for size in (2, 4, 8))):
        if world_size % size == 0 and size <= ranks_per_host:
            rest = world_size // size
            of_a_host = max(n for n in range(1, max(1, ranks_per_host // size) + 1) if rest % n == 0)
            for shards in sorted({rest, of_a_host, 1}, reverse=True):
                yield {"dp_replicate": rest // shards, "dp_shard": shards, **dict.fromkeys(AXES, 1), axis: size}


def _searched(given: RankPlan, job: RankJob, memory: int, rates: Rates) -> list[Tried]:
    """All meshes, those that fit first, the cheapest of them at the top; `given` is the config's as it is."""
    found, failed = list[Tried](), set[str]()  # axes with which greater sizes would fail too
    for sizes in _meshes(job.world_size, job.ranks_per_host):
        axis = next((name for name in AXES if sizes[name] > 1), "")
        for way in WAYS if axis not in failed else ():
            values = {name: n for name, n in sizes.items() if name not in AXES or n != given.mesh[AXES[name]]}
            changes: dict[str, Any] = {f"device.{name}": value for name, value in values.items()}
            if way != given.settings["activation_checkpointing"]:
                changes["device.activation_checkpointing"] = way
            mesh = tried(axis, replace(job, rank=0, changes=changes), rates)
            if mesh.plan is None and way != WAYS[0]:
                break
            found.append(mesh)
            if mesh.plan is None:
                failed.add(axis)
            if mesh.plan is None or mesh.fits(memory):  # more recomputation would only cost more
                break
    return sorted(found, key=lambda each: (not each.fits(memory), each.cost.per_sample if each.cost else math.inf))


def _cost_of(plan: RankPlan, rates: Rates) -> Cost:
    settings, mesh = plan.settings, plan.mesh
    return Cost(
        compute=plan.flops / (rates.tflops * 1e12) * (1 + (mesh["pp"] - 1) / settings["parts"]),
        host=sum(each.sent for each in plan.traffic if each.hosts == 1) / (rates.host_gb * 1e9),
        network=sum(each.sent for each in plan.traffic if each.hosts > 1) / (rates.network_gb * 1e9),
        samples=settings["train_batch_size"] * settings["accumulation"] * mesh["dp_replicate"] * mesh["dp_shard"],
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
    """
    memory = None if gpu_memory is None else parse_size(gpu_memory)
    try:
        of_user = replace(Program.of(program), arguments=overrides)
        job = RankJob(program=of_user, world_size=world, ranks_per_host=ranks_per_host)
        (found,) = apart(f"{__name__}.send", job, rank, memory, Rates() if search else None)
    except ConfigError as error:
        raise PlanError(str(error)) from error
    return cast(MeshPlan, found)


def send(job: RankJob, rank: int | None, memory: int | None, rates: Rates | None, asker: Connection) -> None:
    asker.send(make_plan(job, rank, memory, rates))


# -- A plan as Markdown.


_MEANS = {
    "parameters": "this rank's part",
    "buffers": "",
    "gradients": "this rank's part, and whole ones on their way",
    "optimizer state": "",
    "inputs": "batches on the device",
    "communication": "gathered parameters, and what is sent or received",
    "activations": "made in forward, or again by recomputation",
    "temporaries": "made in backward, or by the optimizer",
}
_SHOWN_MODULES = 12
_LEFT_OUT = "pretrained weights, resuming, validation, saves, loggers, callbacks, verification, compilation"


def _table(header: str, rows: Iterable[Iterable[object]]) -> list[str]:
    names = header.split(" | ")
    return ["", *(f"| {' | '.join(map(str, row))} |" for row in (names, ["---"] * len(names), *rows))]


def markdown(plan: MeshPlan) -> str:
    worst = plan.worst
    mesh = " x ".join(f"{name}={size}" for name, size in worst.mesh.items() if size > 1)
    ranks = f"{worst.world_size} ranks ({mesh})" if mesh else "one rank"
    others = ", ".join(f"rank {rank}: {format_bytes(peak)}" for rank, peak in plan.ranks.items() if rank != worst.rank)
    lines = [f"# Plan of {worst.trainer} on {ranks}", ""]
    lines += [f"Peak of a step on rank {worst.rank}: {format_bytes(worst.peak)}{f' ({others})' if others else ''}."]
    if plan.memory is not None:
        lines[-1] += f" {_verdict(plan)}"
    kinds = [name for name in _MEANS if worst.at_peak.get(name)]
    lines += _table("At the peak | Bytes | ", ([n, format_bytes(worst.at_peak[n]), _MEANS[n]] for n in kinds))
    if plan.tried:
        lines += _table("Change | Peak | Sent in a step | Flags", map(_row_of_change, plan.tried))
    lines += _table_of_meshes(plan) if plan.meshes else []
    lines += _modules(worst)
    rows = [
        [each.operation, each.dimensions, each.ranks, f"{each.calls:,}", f"{each.n_bytes:,}", format_bytes(each.sent)]
        for each in worst.traffic
    ]
    nothing = ["", "Nothing is sent."]
    lines += _table("In a step | Over | Ranks | Calls | Bytes | A rank sends", rows) if rows else nothing
    if worst.read:
        lines += ["", "Asked for values, which a plan does not have; they got 1 or False:", ""]
        lines += [f"- {line}" for line in worst.read]
    lines += ["", f"Left out: {_LEFT_OUT}. Kernels are those of the CPU."]
    return "\n".join(lines)


def _verdict(plan: MeshPlan) -> str:
    size, answer = format_bytes(plan.memory or 0), plan.answer
    if plan.fits:
        return f"It fits into {size}."
    told = f"It does not fit into {size} ({format_bytes(plan.worst.peak - (plan.memory or 0))} too much)"
    if answer is None or answer.plan is None:
        return f"{told}, nor with any change that was tried."
    return f"{told}. It does with `{answer.flags}`: {format_bytes(answer.plan.peak)}."


def _row_of_change(tried: Tried) -> list[str]:
    plan, numbers = tried.plan, [tried.error.replace("|", "/"), "-"]
    if plan is not None:
        numbers = [format_bytes(plan.peak), format_bytes(sum(row.sent for row in plan.traffic))]
    return [tried.change, *numbers, f"`{tried.flags}`"]


def _table_of_meshes(plan: MeshPlan) -> list[str]:
    """Meshes that fit; then those that need too much memory, or cannot be planned."""
    rates, rows, too_large = plan.rates, list[list[str]](), list[str]()
    for each in plan.meshes:
        if each.plan is not None and each.cost is not None and each.fits(plan.memory):
            cost = each.cost
            parts = (cost.per_sample, *(seconds / cost.samples for seconds in (cost.compute, cost.host, cost.network)))
            numbers = [f"{1000 * seconds:.3g}" for seconds in parts]
            rows.append([f"`{each.flags}`", format_bytes(each.plan.peak), *numbers])
        elif each.plan is not None:
            too_large.append(f"`{each.flags}` ({format_bytes(each.plan.peak)})")
    header = "Mesh that fits | Peak | ms of a sample | Computing | In hosts | On the network"
    lines = _table(header, rows) if rows else ["", "No mesh that was planned fits."]
    given = f"{rates.tflops:g} TFLOP/s, {rates.host_gb:g} GB/s in a host and {rates.network_gb:g} GB/s between hosts"
    lines += ["", f"Counted with {given} (`--rates`), as if nothing overlapped."]
    lines += ["", f"Too large: {', '.join(too_large)}."] if too_large else []
    for each in plan.meshes:
        lines += ["", f"Not possible: `{each.flags}`: {each.error}"] if each.error else []
    return lines


def _modules(plan: RankPlan) -> list[str]:
    """Modules that are alike, such as blocks, in one row."""
    found: dict[str, list[int]] = defaultdict(list)
    for name, n_bytes in plan.modules.items():
        if n_bytes:
            found[re.sub(r"\.\d+(?=\.|$)", ".*", name) or "(loss and backward, outside of modules)"].append(n_bytes)
    rows = sorted(found.items(), key=lambda item: -sum(item[1]))
    if len(rows) > _SHOWN_MODULES:
        rows[_SHOWN_MODULES:] = [("others", [n_bytes for _, each in rows[_SHOWN_MODULES:] for n_bytes in each])]
    return _table(
        "At the peak, made by or part of | Modules | Bytes",
        ([name, len(each), format_bytes(sum(each))] for name, each in rows),
    )
