"""Any config as a command line: `--training-parameters.n-epochs 3`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

from dream_trainer.config.config_files import field_types, load_config, required_fields
from dream_trainer.config.optional_sections import sections_opened, with_sections
from dream_trainer.config.short_help import short_help
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.config.uncaught import end_in_a_line
from dream_trainer.config.unknown_arguments import refuse_unknown, refuse_values_of_booleans
from dream_trainer.errors import ConfigError
from dream_trainer.screen import is_in_notebook

T = TypeVar("T", bound=BaseTrainerConfig)


def parse(config: T | type[T], args: Sequence[str] | None = None) -> T:
    """Builds a config from command-line arguments; `--help` shows the user's own fields and those that most runs set,
    `--help-all` every one.

    A flag into a section that is None builds it with its defaults, and `--section None` drops it.
    `--config FILE`, given once or several times, is read first, as by `load_config`; other arguments change what the
    files set. Callbacks are code and not on the command line: they stay as the given instance, or the class's default,
    has them.

    Args:
        config: an instance, whose values are the defaults, or a class, whose fields without default are then required.
        args: the arguments; `sys.argv[1:]` if None, and none in a notebook, where those are the kernel's. Then a
            ConfigError that nobody catches later on ends the script with one line on stderr, too, and exit code 2.

    Raises:
        SystemExit: with code 2 after a message on stderr, if an argument is unknown or a value cannot work; with code 0
            after `--help` or `--help-all`.
    """
    how: tuple[Any, ...] = (tyro.conf.SuppressFixed,)  # hides what has no text
    if args is None and is_in_notebook():
        args = []
    if args is None:  # of a script, which has the config from here to the end
        end_in_a_line()
    try:
        files, args = _take_files(sys.argv[1:] if args is None else args)
        if files:
            config = _from_files(config, files, args)
        if "--help" in args or "-h" in args:
            print(short_help(config, Path(sys.argv[0]).name))
            raise SystemExit(0)
        args = ["--help" if word == "--help-all" else word for word in args]
        cls = config if isinstance(config, type) else type(config)
        if sections_opened(cls, args):
            if isinstance(config, type) and _are_all_there(config, args):
                config = _from_files(config, [], args)
            if not isinstance(config, type):
                how = (*how, tyro.conf.AvoidSubcommands)  # which tyro makes of a section that may be None
                config, args = with_sections(config, args)
        refuse_values_of_booleans(config, args)
        if isinstance(config, type):
            found, unknown = tyro.cli(config, args=args, config=how, return_unknown_args=True)
            refuse_unknown(config, unknown)
            return found
        parsed, unknown = tyro.cli(cls, args=args, default=config, config=how, return_unknown_args=True)
        refuse_unknown(config, unknown)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    parsed.callbacks = config.callbacks  # tyro would build an empty collection of its own
    return parsed


def _take_files(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of `--config`, and the other arguments."""
    files: list[str] = []
    others: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--config":
            file = next(words, None)
            if file is None or file.startswith("--"):
                raise ConfigError("--config names no file. Use --config run.yaml.")
            files.append(file)
        elif word.startswith("--config="):
            files.append(word.removeprefix("--config="))
        else:
            others.append(word)
    return files, others


def _from_files(config: T | type[T], files: list[str], args: list[str]) -> T:
    """What a class has no default for may come as flags, which count over the files."""
    if not isinstance(config, type):
        return load_config(config, *files)
    types = field_types(config)
    named = [(name, types[name]) for name in required_fields(config) if _is_there(name, args)]
    words = [word for word in args if word not in ("-h", "--help", "--help-all")]
    required: type[Any] = make_dataclass("Required", named)
    found, _ = tyro.cli(required, args=words, return_unknown_args=True)
    return load_config(config, *files, **vars(found))


def _are_all_there(cls: type, args: list[str]) -> bool:
    return all(_is_there(name, args) for name in required_fields(cls))


def _is_there(name: str, args: list[str]) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == f"--{name.replace('_', '-')}" for word in args)
