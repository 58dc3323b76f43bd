"""`dream-trainer describe`, `check` and `plan`: a trainer's setup, its properties, and what it needs on many ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from dream_trainer.cli.output import Shows
from dream_trainer.errors import ConfigError
from dream_trainer.screen import show
from dream_trainer.testing.program import Program


@dataclass(frozen=True, kw_only=True)
class OfProgram:
    """The arguments of commands on a program's trainer."""

    target: Annotated[Positional[str], arg(metavar="PROGRAM[:NAME]")]
    """A Python file or a module; and a trainer class in it, or a function that returns a trainer. Without a name: the
    first trainer that the program fits."""
    function: str = "default_config"
    """The function there, without arguments, that returns the config of a trainer class."""

    def program(self, *overrides: str) -> Program:
        return replace(Program.of(self.target), config=self.function, arguments=overrides)


@dataclass(frozen=True, kw_only=True)
class DescribeTrainer(OfProgram):
    """Print a trainer's setup order with its reasons, and the listeners of each event. Nothing is built or trained, so
    NAME has to be given."""

    def run(self) -> None:
        program = self.program()
        if not program.name:
            raise ConfigError(f"{self.target!r} names no trainer. Use PROGRAM:NAME, such as train.py:Trainer.")
        if (trainer := program.make()) is None:
            raise ConfigError(
                f"{program.path} has no function {self.function!r} that returns the config of {program.name}. Write "
                "one, or choose another with --function; or give a function that returns a trainer."
            )
        print(trainer.describe())


@dataclass(frozen=True, kw_only=True)
class CheckTrainer(OfProgram, Shows):
    """Run a trainer in fresh processes on 1, 2 and 4 CPU ranks, and report whether it is deterministic, and the same on
    ranks, after a resume and after a kill. Other flags after the program, and all after --, change its config, such as
    --training.max-steps 8."""

    quick: bool = False
    """Whether to leave out slower checks: four ranks, more places to stop at, SIGTERM, workers."""
    only: Literal["deterministic", "parity", "resume", "kill", "order", "validation", "schedules", "cost"] | None = None
    """The check to run; None runs all."""

    def run(self, *overrides: str) -> int:
        from dream_trainer.testing.suite import CHECKS, report

        checks = CHECKS if self.only is None else (self.only,)
        return report(self.program(*overrides), checks, quick=self.quick, as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class PlanTrainer(OfProgram, Shows):
    """Print what a rank of many would hold and send in a step, planned on one CPU: memory by kind and module, and each
    collective. Other flags after the program, and all after --, change its config, such as
    --device.tensor-parallel 2."""

    world: int
    """Number of ranks, up to 4096."""
    rank: int | None = None
    """The rank to plan; None plans the first and the last, and prints the one that needs more memory."""
    gpu_memory: str | None = None
    """Memory of a device, such as 80GiB. If a rank needs more, plans of changes follow, and the exit code is 1."""
    ranks_per_host: int = 8
    """Neighbouring ranks on one host."""
    search: bool = False
    """Whether to plan meshes and recomputation, and to list those that fit, the cheapest first. Takes minutes."""
    rates: Annotated[tuple[float, float, float], arg(metavar="TFLOPS HOST_GB NETWORK_GB")] = (400.0, 300.0, 40.0)
    """What a search counts with: 10^12 operations a second of a device, as training reaches them, and 10^9 bytes a
    second that a rank sends to ranks of its host, and of other hosts."""

    def run(self, *overrides: str) -> int:
        from dream_trainer.planning.planned_trainer import RankJob
        from dream_trainer.planning.planner import Rates, make_plan, markdown
        from dream_trainer.weights.weight_files import parse_size

        job = RankJob(program=self.program(*overrides), world_size=self.world, ranks_per_host=self.ranks_per_host)
        memory = None if self.gpu_memory is None else parse_size(self.gpu_memory)
        found = make_plan(job, self.rank, memory, Rates(*self.rates) if self.search else None)
        show(json.dumps(asdict(found), indent=2) if self.as_json else markdown(found))
        return int(found.fits is False)
