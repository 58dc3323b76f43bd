"""The plan of one rank, made in a process of its own."""

from __future__ import annotations

import os
import pickle
import re
import resource
import shutil
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

from dream_trainer.compat.lone_rank import DynamicOutputShapeException, ranks_of_group
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.config.parallel_parameters import PipelineParallelParameters
from dream_trainer.errors import ConfigError, DreamTrainerError
from dream_trainer.planning.planned_trainer import LEFT_OUT, PlannedTrainer, in_place_of
from dream_trainer.planning.planned_world import NeedsFirstStageError, PlanError
from dream_trainer.planning.tracker import StepMeasure, Traffic
from dream_trainer.testing.program import Program, become_rank
from dream_trainer.testing.rank_process import told
from dream_trainer.trainer.abstract import building_instead

Changes = Mapping[str, Mapping[str, Any]]
"""Of each of a config's groups the values to change."""


@dataclass(frozen=True)
class Crossing:
    """What one collective over the ranks of some dimensions does in a step."""

    operation: str
    dimensions: str
    ranks: int
    calls: int
    n_bytes: int
    """Of whole tensors: gathered, before they are scattered, or reduced."""
    sent: int
    """By this rank, if a collective is a ring."""
    hosts: int
    """On which the ranks are."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank holds and sends in a step."""

    trainer: str
    rank: int
    world_size: int
    mesh: dict[str, int]
    parameters: int
    """Number of elements that this rank has."""
    peak: int
    at_peak: dict[str, int]
    """Bytes at the peak by kind."""
    modules: dict[str, int]
    """Bytes at the peak by module."""
    after: dict[str, int]
    """Bytes after a step by kind."""
    traffic: list[Crossing]
    flops: int
    """Of matrix products and attention in a step, with what is computed again."""
    read: dict[str, int]
    """Lines that asked a tensor for its value, with the number of times."""
    settings: dict[str, Any]
    """The config's values that a smaller peak would change, and the parts of a batch in a pipeline."""
    left_out: str
    numbers: list[int] | None = None
    """What the first stage of a pipeline tells the next one."""
    seconds: float = 0.0
    process_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change of the config, and the rank with it."""

    change: str
    flags: str
    """As they are written on the command line."""
    plan: RankPlan | None = None
    """None: it cannot be planned."""
    error: str = ""


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


def plan_rank(job: RankJob) -> RankPlan:
    """Forks a process that becomes the rank.

    Raises:
        PlanError: The program fails, or cannot be planned.
    """
    scratch = tempfile.mkdtemp(prefix="dream-trainer-plan-")
    try:
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
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if isinstance(result, RankPlan):
        return result
    raise PlanError(result) if result else NeedsFirstStageError


def _become(job: RankJob, scratch: Path) -> NoReturn:
    """The work of the forked process."""
    output = os.open(scratch / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()

    def end(result: RankPlan | str) -> NoReturn:
        temporary = scratch / "found.new"
        temporary.write_bytes(pickle.dumps(result))
        temporary.rename(scratch / "found")
        os._exit(0)

    found = ""  # also if the first stage has to be planned before
    try:
        _run(job, scratch, end)
    except NeedsFirstStageError:
        pass
    except SystemExit:  # the program has said why
        sys.stdout.flush()
        sys.stderr.flush()
        said = re.sub("[╭╮╰╯│─]", " ", (scratch / "output").read_text(errors="replace"))  # a parser's frame
        found = " ".join(said.split()).removeprefix("error: ")[-700:] or "the program has ended itself."
    except BaseException as error:
        found = _told(error)
    end(found)


def _run(job: RankJob, scratch: Path, end: Callable[[RankPlan], NoReturn]) -> None:
    Distribution.set_default_validate_args(False)  # its checks look at values
    began, program = time.monotonic(), job.program
    become_rank(job.rank, job.world_size, min(job.ranks_per_host, job.world_size))

    def done(trainer: Any, measured: StepMeasure) -> NoReturn:
        end(replace(plan_of(trainer, measured), seconds=time.monotonic() - began))

    values = {"_program": program, "_changes": job.changes, "_numbers": job.numbers, "_scratch": str(scratch / "runs")}
    with building_instead(in_place_of(PlannedTrainer, _done=staticmethod(done), **values)):
        trainer = program.make() if program.pickled or program.name else None
        if trainer is None:
            program.run_as_script()
        else:
            trainer.fit()
    raise ConfigError(f"{program.path} has ended without fit() of {program.name or 'a trainer'}.")


def plan_of(trainer: Any, measured: StepMeasure) -> RankPlan:
    """Of the rank that `trainer` is, real or planned."""
    world, config = trainer.world, trainer.config
    own = {id(p): p for model in trainer.named_models().values() for p in model.parameters()}
    traffic = [_sent(world, name, group, each) for (name, group), each in measured.traffic.items()]
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
        peak=measured.peak,
        at_peak=measured.at_peak,
        modules=measured.modules,
        after=measured.end,
        traffic=sorted(traffic, key=lambda row: (row.dimensions, row.operation)),
        flops=measured.flops,
        read={line: times for line, times in measured.read.items() if line},
        settings=settings,
        left_out=", ".join([*LEFT_OUT, *(["compilation"] if trainer.left_out_compilation else [])]),
        numbers=vars(world).get("sent_numbers"),
        process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


_SHARES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def _sent(world: Any, operation: str, group: str, traffic: Traffic) -> Crossing:
    ranks = ranks_of_group(group)
    n = len(ranks)
    share = _SHARES[operation] * (n - 1) / n if operation in _SHARES else float(operation != "receive")
    return Crossing(
        operation,
        _dimensions(world, ranks),
        n,
        traffic.calls,
        traffic.n_bytes,
        round(share * traffic.n_bytes),
        len(set(map(world.host_of, ranks))),
    )


def _dimensions(world: Any, ranks: list[int]) -> str:
    """The mesh dimensions along which ranks differ."""
    names = []
    places: dict[int, dict[str, int]] = {rank: {} for rank in ranks}
    for rank in ranks:
        rest = rank
        for name, size in reversed(world.mesh_shape._asdict().items()):
            rest, places[rank][name] = divmod(rest, size)
    for name, size in world.mesh_shape._asdict().items():
        different = len({place[name] for place in places.values()})
        if different > 1:
            names.append(name if different == size else f"{name} ({different} of {size})")
    return " x ".join(names)


def _told(error: BaseException) -> str:
    """An error in a user's words, with their line."""
    of_user = told(error)
    place = f" ({of_user['place']})" if of_user["place"] else ""
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the shape of a result depends on values, which a plan does not have{place}. Use operations whose shapes "
            "are known, such as torch.where and masks instead of indexing by a condition."
        )
    if isinstance(error, DreamTrainerError):
        return f"{error}{place if not isinstance(error, ConfigError) else ''}"
    return f"{of_user['kind']}: {' '.join(of_user['message'].split())}{place}"
