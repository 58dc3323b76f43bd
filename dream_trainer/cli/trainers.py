"""`dream-trainer describe`, `check` and `plan`: a trainer's setup, its properties, and what it needs on many ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from dream_trainer.errors import ConfigError
from dream_trainer.screen import show
from dream_trainer.testing.program import Program


@dataclass(frozen=True, kw_only=True)
class DescribeTrainer:
    """Print a trainer's setup order with its reasons, and the listeners of each event. Nothing is built or trained."""

    target: Annotated[Positional[str], arg(metavar="PROGRAM:TRAINER")]
    """A Python file or a module, and a trainer class in it; or a function in it that returns a trainer."""
    config: Annotated[str, arg(metavar="FUNCTION")] = "default_config"
    """The function there, without arguments, that returns the config of a trainer class."""

    def run(self) -> int:
        print(self._trainer().describe())
        return 0

    def _trainer(self) -> Any:
        path, _, name = self.target.rpartition(":")
        if not path or not name:
            raise ConfigError(f"{self.target!r} names no trainer. Use PROGRAM:TRAINER, such as train.py:Trainer.")
        trainer = Program(path=path, name=name, config=self.config).make()
        if trainer is None:
            raise ConfigError(
                f"{path} has no function {self.config!r} that returns the config of {name}. Write one, or "
                "choose another with --config; or give a function that returns a trainer."
            )
        return trainer


@dataclass(frozen=True, kw_only=True)
class CheckTrainer:
    """Run a trainer in fresh processes on 1, 2 and 4 CPU ranks, and report whether it is deterministic, and the same on
    ranks, after a resume and after a kill. Other flags after the program, and all after --, change its config, such as
    --training.max-steps 8."""

    target: Annotated[Positional[str], arg(metavar="PROGRAM[:NAME]")]
    """A Python file or a module; and a trainer class in it, or a function that returns a trainer. Without a name: the
    first trainer that the program fits."""
    quick: bool = False
    """Whether to leave out slower checks: four ranks, more places to stop at, SIGTERM, workers."""
    only: Literal["deterministic", "parity", "resume", "kill", "order", "validation", "schedules", "cost"] | None = None
    """The check to run; None runs all."""
    function: str = "default_config"
    """The function there, without arguments, that returns the config of a trainer class."""
    json: bool = False
    """Whether to print JSON."""

    def run(self, *overrides: str) -> int:
        from dream_trainer.testing.findings import CHECKS
        from dream_trainer.testing.suite import report

        path, _, name = self.target.rpartition(":")
        program = Program(path=path or name, name=name if path else "", config=self.function, arguments=overrides)
        checks = CHECKS if self.only is None else (self.only,)
        return report(program, checks, quick=self.quick, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class PlanTrainer:
    """Print what a rank of many would hold and send in a step, planned on one CPU: memory by kind and module, and each
    collective. Other flags after the program, and all after --, change its config, such as
    --device.tensor-parallel 2."""

    target: Annotated[Positional[str], arg(metavar="PROGRAM[:NAME]")]
    """A Python file or a module; and a trainer class in it, or a function that returns a trainer. Without a name: the
    first trainer that the program fits."""
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
    function: str = "default_config"
    """The function there, without arguments, that returns the config of a trainer class."""
    json: bool = False
    """Whether to print JSON."""

    def run(self, *overrides: str) -> int:
        from dream_trainer.planning.planner import make_plan
        from dream_trainer.planning.report import markdown
        from dream_trainer.weights.export_files import parse_size

        path, _, name = self.target.rpartition(":")
        program = Program(path=path or name, name=name if path else "", config=self.function, arguments=overrides)
        found = make_plan(
            program,
            self.world,
            rank=self.rank,
            ranks_per_host=self.ranks_per_host,
            rates=self.rates if self.search else None,
            memory=None if self.gpu_memory is None else parse_size(self.gpu_memory),
            tell=_tell,
        )
        show(json.dumps(asdict(found), indent=2) if self.json else markdown(found))
        return int(found.fits is False)


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        show(f"planning {line} ...", sys.stderr)
