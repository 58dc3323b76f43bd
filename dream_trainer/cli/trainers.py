"""`dream-trainer describe` and `check`: print a trainer's plan, and check its properties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from dream_trainer.errors import ConfigError
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
    ranks, after a resume and after a kill. Flags after the program change its config, such as
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
