"""The user's program: how a command or a fresh process finds the trainer in it."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from runpy import run_module, run_path
from types import ModuleType
from typing import Any, NoReturn

from dream_trainer.errors import ConfigError, DreamTrainerError

MakeTrainer = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Program:
    path: str = ""  # a Python file or a module
    name: str = ""  # a trainer class or a function that returns a trainer; empty for the first that the program fits
    config: str = "default_config"  # the function that returns the config of a trainer class
    arguments: tuple[str, ...] = ()  # of the program; those of a class or function change its config

    @classmethod
    def of(cls, make_trainer: MakeTrainer | str) -> Program:
        """The program of an argument of `dream_trainer.testing`'s functions."""
        if isinstance(make_trainer, str):
            path, _, name = make_trainer.rpartition(":")
            return cls(path=path, name=name) if path else cls(path=name)
        name, module = make_trainer.__qualname__, vars(sys.modules[make_trainer.__module__])
        if module.get(name) is not make_trainer or "__file__" not in module:
            raise ConfigError(f'{name} is no function of a module. Use a function of a module, or "PROGRAM:FUNCTION".')
        is_script = make_trainer.__module__ == "__main__"
        return cls(path=str(Path(module["__file__"]).resolve()) if is_script else make_trainer.__module__, name=name)

    def make(self) -> Any:
        """The trainer of a class or function; None where the program itself has to be run."""
        from dream_trainer.trainer.abstract import AbstractTrainer

        members = vars(self._load())
        found = members.get(self.name)
        if isinstance(found, type) and issubclass(found, AbstractTrainer):
            make_config: Any = members.get(self.config)
            config: Any = make_config() if callable(make_config) else None
            return None if config is None else found(config)
        trainer = found() if callable(found) and not isinstance(found, type) else None
        if not isinstance(trainer, AbstractTrainer):
            own = [v for v in members.values() if isinstance(v, type) and v.__module__ == members["__name__"]]
            trainers = [value.__name__ for value in own if issubclass(value, AbstractTrainer)]
            raise ConfigError(
                f"{f'{self.path}:{self.name}'!r} is no trainer class, and no function that returns a trainer. "
                f"{self.path} has {trainers or 'no trainers'}."
            )
        return trainer

    def _load(self) -> ModuleType:
        """The module; a file is loaded, but not run as a script."""
        path = self.script()
        if not self.path.endswith(".py"):
            return import_module(self.path)
        sys.path.insert(0, str(path.parent))  # a script may import files next to it
        spec: Any = spec_from_file_location("described_program", path)
        module = sys.modules[spec.name] = module_from_spec(spec)  # a dataclass looks for its module there
        spec.loader.exec_module(module)
        return module

    def script(self) -> Path:
        """Its file."""
        path: str | None = self.path
        with suppress(ModuleNotFoundError):  # a package that the module would be in
            if not self.path.endswith(".py") and (found := find_spec(self.path)) is not None:
                path = found.origin
        if path is None or not Path(path).is_file():
            raise ConfigError(f"there is no program {self.path!r}. Give a Python file, or a module.")
        return Path(path).resolve()

    def run(self, kind: type, **values: Any) -> NoReturn:
        """Runs the program with `kind`, and these attributes, before its trainers' class; a `fit` ends the process."""
        from dream_trainer.trainer.abstract import built_instead

        is_script = False

        def subclass(cls: type) -> type:
            is_meant = not (is_script and self.name) or any(part.__name__ == self.name for part in cls.__mro__)
            return in_place_of(cls, kind, **values) if is_meant else cls

        built_instead.set(subclass)
        if self.name and (trainer := self.make()) is not None:
            with trainer:
                trainer.fit()
        else:  # as `python PROGRAM ARGUMENTS` does
            is_script, path = True, self.script()
            sys.argv = [str(path), *self.arguments]
            if self.path.endswith(".py"):
                sys.path.insert(0, str(path.parent))
                run_path(str(path), run_name="__main__")
            else:
                run_module(self.path, run_name="__main__", alter_sys=True)
        raise ConfigError(f"{self.path} has ended without fit() of {self.name or 'a trainer'}.")


def in_place_of(cls: type, kind: type, **values: Any) -> type:
    """A user's class with `kind`, and these attributes, before it."""
    first = type(kind.__name__, (kind,), {"__module__": kind.__module__, **values})
    return type(cls.__name__, (first, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def overridden(config: Any, program: Program) -> Any:
    """The config with the arguments; a script has read them itself."""
    if not program.name or not program.arguments or sys.argv[1:] == [*program.arguments]:
        return config
    from dream_trainer.config.command_line import parse

    vars(config).update(vars(parse(config, program.arguments)))
    return config


def move(config: Any, runs_dir: str, callback: Any, saves: dict[str, Any]) -> None:
    """Makes a run write its log and all checkpoints that it is told to save to another directory."""
    config.runs_dir = runs_dir
    config.callbacks.add_default(callback)
    every = [f"save_every_n_{unit}" for unit in ("steps", "minutes", "epochs")]
    unset = dict.fromkeys((*every, "directory", "local_directory", "save_local_every_n_steps"))
    unset |= dict.fromkeys(("keep_last", "keep_best", "keep_every_n_steps")) | {"save_on_best": False}
    change(config, checkpoint=unset | saves, logger={"loggers": ("jsonl",)})


def change(config: Any, **groups: Mapping[str, Any]) -> None:
    for group, values in groups.items():
        if (name := f"{group}_parameters") in vars(config):  # unless it lacks the mixin
            setattr(config, name, replace(vars(config)[name], **values))


def become_rank(rank: int, world_size: int, ranks_per_host: int) -> None:
    """Sets the environment as torchrun does."""
    host, local = divmod(rank, ranks_per_host)
    sizes = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world_size, "GROUP_RANK": host}
    sizes |= {"LOCAL_WORLD_SIZE": ranks_per_host, "GROUP_WORLD_SIZE": -(-world_size // ranks_per_host)}
    os.environ |= {name: str(value) for name, value in sizes.items()}


# -- work in a process of its own; the one that asks for it needs no torch


def preload() -> None:
    own = "dream_trainer.trainer.dream", "dream_trainer.callbacks", "dream_trainer.checkpoint.store"
    for name in (*own, "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        import_module(name)


def interpreter(function: Callable[..., None], *args: Any) -> list[str]:
    """The command line of a new interpreter that finds the same modules, and calls a function of this package."""
    call = f"from {function.__module__} import {function.__name__} as work; work(*{args!r})"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; {call}"]


def apart(function: str, *args: Any, **named: Any) -> Iterator[Any]:
    """What a function of this path sends by its last argument, in a new process: it has no threads, so it can fork."""
    ours, theirs = Pipe()
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    options |= {"env": environment, "pass_fds": [theirs.fileno()], "start_new_session": True}
    with subprocess.Popen(interpreter(be_apart, theirs.fileno()), **options), ours:
        theirs.close()
        ours.send((function, args, named))
        while (found := ours.recv()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found


def be_apart(pipe: int) -> None:
    preload()
    with Connection(pipe) as asker:
        function, args, named = asker.recv()
        module, _, name = function.rpartition(".")
        try:
            vars(import_module(module))[name](*args, asker, **named)
            asker.send(None)
        except Exception as error:
            if not isinstance(error, DreamTrainerError):
                error.add_note(traceback.format_exc())
            asker.send(error)
