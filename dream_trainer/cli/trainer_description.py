"""`dream-trainer describe`: what a trainer would do, in which order, without building or training anything."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from tyro.conf import Positional, arg

from dream_trainer.checks import refuse
from dream_trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DescribeTrainer:
    """Print a trainer's setup order with its reasons, and who listens to which event. Nothing is built or trained."""

    target: Annotated[Positional[str], arg(metavar="PROGRAM:TRAINER")]
    """A Python file or a module, and a trainer class in it; or a function in it that returns a trainer."""
    config: Annotated[str, arg(metavar="FUNCTION")] = "default_config"
    """The function there, without arguments, that returns the config of a trainer class."""

    def run(self) -> int:
        print(self._trainer().describe())
        return 0

    def _trainer(self) -> Any:
        from dream_trainer.trainer.abstract import AbstractTrainer

        program, _, name = self.target.rpartition(":")
        if not program or not name:
            raise ConfigError(f"{self.target!r} names no trainer. Use PROGRAM:TRAINER, such as train.py:Trainer.")
        members = vars(_loaded(program))
        found, trainer = members.get(name), None
        if isinstance(found, type) and issubclass(found, AbstractTrainer):
            make_config = members.get(self.config)
            if not callable(make_config):
                raise ConfigError(
                    f"{program} has no function {self.config!r} that returns the config of {name}. Write one, or "
                    "choose another with --config; or give a function that returns a trainer."
                )
            its_config: Any = make_config()
            trainer = found(its_config)
        elif callable(found) and not isinstance(found, type):
            trainer = found()
        if not isinstance(trainer, AbstractTrainer):
            own = [v for v in members.values() if isinstance(v, type) and v.__module__ == members["__name__"]]
            trainers = [value.__name__ for value in own if issubclass(value, AbstractTrainer)]
            raise ConfigError(
                f"{self.target!r} is no trainer class, and no function that returns a trainer. {program} has "
                f"{trainers or 'no trainers'}."
            )
        return trainer


def _loaded(program: str) -> ModuleType:
    """The module; a file is loaded, but not run as a script."""
    path = Path(program).resolve()
    spec = spec_from_file_location("described_program", path)
    if not program.endswith(".py") or spec is None or spec.loader is None:
        try:
            return import_module(program)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{program!r} cannot be imported: {error}. Give a Python file, or a module.") from error
    refuse(not path.is_file(), f"there is no file {program!r}. Give a Python file, or a module.")
    sys.path.insert(0, str(path.parent))  # a script may import files beside it
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks for its module there
    spec.loader.exec_module(module)
    return module
