"""The plan of one rank, made in a process of its own."""

from __future__ import annotations

import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from torch.distributions import Distribution

from dream_trainer.compat.lone_rank import DynamicOutputShapeException
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.config.parallel_parameters import PipelineParallelParameters
from dream_trainer.errors import ConfigError, DreamTrainerError
from dream_trainer.planning.planned_trainer import LEFT_OUT, PlannedTrainer
from dream_trainer.planning.planned_world import NeedsFirstStageError, PlanError
from dream_trainer.planning.tracker import StepMeasure
from dream_trainer.testing.program import Program, become_rank
from dream_trainer.testing.rank_process import stand_apart, told, write_whole

Changes = Mapping[str, Mapping[str, Any]]
"""Of each of a config's groups the values to change."""


@dataclass(frozen=True, kw_only=True)
class RankPlan(StepMeasure):
    """What one rank holds and sends in a step."""

    trainer: str
    rank: int
    world_size: int
    mesh: dict[str, int]
    parameters: int
    """Number of elements that this rank has."""
    settings: dict[str, Any]
    """The config's values that a smaller peak would change, and the parts of a batch in a pipeline."""
    left_out: str
    numbers: list[int] | None = None
    """What the first stage of a pipeline tells the next one."""
    seconds: float = 0.0
    process_bytes: int = 0


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
class Tried:
    """A change of the config, and the rank with the highest peak with it."""

    change: str
    flags: str
    """As they are written on the command line."""
    plan: RankPlan | None = None
    """None: it cannot be planned."""
    error: str = ""
    cost: Cost | None = None
    """Of a mesh that a search has planned."""

    def fits(self, memory: int | None) -> bool:
        return self.plan is not None and self.plan.peak <= (memory or 0)


@dataclass(frozen=True, kw_only=True)
class RankJob:
    program: Program
    rank: int
    world_size: int
    ranks_per_host: int = 8
    changes: Changes = field(default_factory=dict)
    numbers: list[int] | None = None


def flags_of(changes: Changes) -> str:
    """As they are written on the command line."""
    return " ".join(
        f"--{group.removesuffix('_parameters')}.{name}".replace("_", "-") + f"={value}"
        for group, values in changes.items()
        for name, value in values.items()
    )


def tried(change: str, changes: Changes, job: RankJob, cost_of: Callable[[RankPlan], Cost] | None = None) -> Tried:
    """The plan of its rank with these changes; in a pipeline with `cost_of` also of the last one."""
    flags, plans = flags_of(changes), list[RankPlan]()
    try:
        first, after = plan_rank(job.rank, replace(job, changes=changes, numbers=None))
        plans.append(first)
        if cost_of is not None and first.mesh["pp"] > 1:  # elsewhere ranks hold equal parts
            plans.append(plan_rank(job.world_size - 1, after)[0])
    except PlanError as error:
        return Tried(change=change, flags=flags, error=" ".join(str(error).split()))
    worst = max(plans, key=lambda each: each.peak)
    costs = () if cost_of is None else map(cost_of, plans)
    return Tried(
        change=change, flags=flags, plan=worst, cost=max(costs, key=lambda each: each.per_sample, default=None)
    )


def plan_rank(rank: int, job: RankJob) -> tuple[RankPlan, RankJob]:
    """Plans it, and also returns the job of further ranks, which knows what stages of a pipeline give one another.

    Raises:
        PlanError: The program fails, or cannot be planned.
    """
    try:
        found = _planned(replace(job, rank=rank))
    except NeedsFirstStageError:
        job = replace(job, numbers=_planned(replace(job, rank=0)).numbers)
        found = _planned(replace(job, rank=rank))
    return found, replace(job, numbers=job.numbers or found.numbers)


def _planned(job: RankJob) -> RankPlan:
    """Forks a process that becomes the rank."""
    with tempfile.TemporaryDirectory(prefix="dream-trainer-plan-", ignore_cleanup_errors=True) as scratch:
        sys.stdout.flush()
        sys.stderr.flush()
        if (child := os.fork()) == 0:
            _become(job, Path(scratch))
        try:
            os.waitpid(child, 0)
        finally:
            with suppress(ProcessLookupError):  # also its loaders' workers; and itself after Ctrl-C
                os.killpg(child, signal.SIGKILL)
        found = Path(scratch) / "found"
        if not found.exists():
            lines = (Path(scratch) / "output").read_text(errors="replace").strip().splitlines()
            raise PlanError(f"the process of rank {job.rank} has ended without a plan: {' '.join(lines[-3:])}")
        result = pickle.loads(found.read_bytes())
    if isinstance(result, RankPlan):
        return result
    raise PlanError(result) if result else NeedsFirstStageError


def _become(job: RankJob, scratch: Path) -> NoReturn:
    """The work of the forked process, which ends with `_done` or an error."""
    stand_apart(scratch / "output")
    found = ""  # also if the first stage has to be planned before
    try:
        _run(job, scratch)
    except NeedsFirstStageError:
        pass
    except SystemExit:  # the program has said why
        sys.stdout.flush()
        sys.stderr.flush()
        said = re.sub("[╭╮╰╯│─]", " ", (scratch / "output").read_text(errors="replace"))  # a parser's frame
        found = " ".join(said.split()).removeprefix("error: ")[-700:] or "the program has ended itself."
    except BaseException as error:
        found = _told(error)
    write_whole(scratch / "found", found)
    os._exit(0)


def _run(job: RankJob, scratch: Path) -> NoReturn:
    Distribution.set_default_validate_args(False)  # its checks look at values
    began, program = time.monotonic(), job.program
    become_rank(job.rank, job.world_size, min(job.ranks_per_host, job.world_size))

    def done(trainer: Any, measured: StepMeasure) -> NoReturn:
        write_whole(scratch / "found", replace(plan_of(trainer, measured), seconds=time.monotonic() - began))
        os._exit(0)

    values = {"_program": program, "_changes": job.changes, "_numbers": job.numbers, "_scratch": str(scratch / "runs")}
    program.run(PlannedTrainer, _done=staticmethod(done), **values)


def plan_of(trainer: Any, measured: StepMeasure) -> RankPlan:
    """Of the rank that `trainer` is, real or planned."""
    world, config = trainer.world, trainer.config
    own = {id(p): p for model in trainer.named_models().values() for p in model.parameters()}
    training, devices = config.training_parameters, config.device_parameters
    pipeline: PipelineParallelParameters | None = vars(config).get("pipeline_parallel_parameters")
    stages = world.mesh_shape.pp
    settings = {
        "activation_checkpointing": devices.activation_checkpointing,
        "train_batch_size": training.train_batch_size,
        "global_batch_size": training.global_batch_size,
        "accumulation": trainer.accumulation_steps,
        "parts": 1 if pipeline is None else pipeline.stages_of_each_rank * (pipeline.microbatches or 2 * stages),
    }
    return RankPlan(
        trainer=type(trainer).__name__,
        rank=world.rank,
        world_size=world.world_size,
        mesh=world.mesh_shape._asdict(),
        parameters=sum(local_tensor(p).numel() for p in own.values()),
        **vars(measured),
        settings=settings,
        left_out=", ".join([*LEFT_OUT, *(["compilation"] if trainer.left_out_compilation else [])]),
        numbers=vars(world).get("sent_numbers"),
        process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def _told(error: BaseException) -> str:
    """An error in a user's words, with their line."""
    of_user = told(error)
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the shape of a result depends on values, which a plan does not have{of_user['place']}. Use operations "
            "whose shapes are known, such as torch.where and masks instead of indexing by a condition."
        )
    if isinstance(error, DreamTrainerError):
        return f"{error}{of_user['place'] if not isinstance(error, ConfigError) else ''}"
    return str(of_user["text"])
