"""`dream-trainer describe`: what a trainer would do, in which order, without building or training anything."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from tyro.conf import Positional, arg

from dream_trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DescribeTrainer:
    """Print a trainer's setup order with its reasons, and who listens to which event. Nothing is built or trained."""

    target: Annotated[Positional[str], arg(metavar="PROGRAM:TRAINER")]
    """A Python file or a module, and a trainer class in it; or a function in it that returns a trainer."""
    config: Annotated[str, arg(metavar="FUNCTION")] = "default_config"
    """The function there, without arguments, that returns the config of a trainer class."""

    def run(self) -> int:
        """Prints."""
        print(trainer_of(self.target, self.config).describe())
        return 0


def trainer_of(target: str, config: str) -> Any:
    """The trainer that `target` names, not launched.

    Raises:
        ConfigError: There is none, or no config for it.
    """
    from dream_trainer.trainer.abstract import AbstractTrainer

    program, _, name = target.rpartition(":")
    if not program or not name:
        raise ConfigError(f"{target!r} names no trainer. Write PROGRAM:TRAINER, such as train.py:Trainer.")
    module = _loaded(program)
    found: Any = vars(module).get(name)
    if isinstance(found, type) and issubclass(found, AbstractTrainer):
        make_config: Any = vars(module).get(config)
        if not callable(make_config):
            raise ConfigError(
                f"{program} has no function {config!r} that returns the config of {name}. Write one, or name another "
                "by --config; or give a function that returns a trainer."
            )
        its_config: Any = make_config()
        trainer: Any = found(its_config)
    else:
        trainer = found() if callable(found) and not isinstance(found, type) else None
    if not isinstance(trainer, AbstractTrainer):
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        own = [value for value in classes if value.__module__ == module.__name__]
        trainers = [value.__name__ for value in own if issubclass(value, AbstractTrainer)]
        raise ConfigError(
            f"{target!r} is no trainer class, and no function that returns a trainer. Of {program}'s own there are "
            f"{trainers or 'no trainers'}."
        )
    return trainer


def _loaded(program: str) -> ModuleType:
    """The module; a file is loaded, but not run as a script."""
    if not program.endswith(".py"):
        try:
            return importlib.import_module(program)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{program!r} cannot be imported: {error}. Give a Python file, or a module.") from error
    path = Path(program).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {program!r}.")
    sys.path.insert(0, str(path.parent))  # as of a script: it may import files beside it
    spec = importlib.util.spec_from_file_location("described_program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module
