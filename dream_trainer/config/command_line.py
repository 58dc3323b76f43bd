"""Any config as a command line: `--training.n-epochs 3`, or in full `--training-parameters.n-epochs 3`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import Field, fields, is_dataclass, make_dataclass, replace
from types import NoneType
from typing import Any, TypeVar

import tyro

from dream_trainer.config.config_files import (
    class_of,
    field_meant,
    field_types,
    load_config,
    required_fields,
    section_of,
)
from dream_trainer.config.parameter_class import members, with_new_names
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError
from dream_trainer.screen import is_in_notebook

T = TypeVar("T", bound=BaseTrainerConfig)
_HELP = ("-h", "--help", "-H", "--help-verbose")


def parse(config: T | type[T], args: Sequence[str] | None = None) -> T:
    """Builds a config from command-line arguments. `--help` lists the flags, `--help-verbose` explains them.

    A flag into a section that is None builds it with its defaults, and `--section None` drops it.
    `--config FILE`, given once or several times, is read first, as by `load_config`; other arguments override files.
    Callbacks are code and not on the command line: they stay as in the given instance, or at the class's default.

    Args:
        config: An instance, whose values are the defaults, or a class, whose fields without default are then required.
        args: The arguments. None takes `sys.argv[1:]`, or none in a notebook, whose arguments are the kernel's.

    Raises:
        SystemExit: With code 2 after a message on stderr, if an argument is unknown or a value is invalid; with code 0
            after `--help`.
    """
    if args is None and is_in_notebook():
        args = []
    try:
        return _parsed(config, sys.argv[1:] if args is None else args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _parsed(config: T | type[T], args: Sequence[str]) -> T:
    # Fields without a text form are hidden; of one that may be None tyro would make a subcommand, if it can.
    how = (tyro.conf.SuppressFixed, tyro.conf.AvoidSubcommands)
    of_files = ArgumentParser(add_help=False, allow_abbrev=False)
    of_files.add_argument("--config", action="append", default=[], metavar="FILE")
    found, args = of_files.parse_known_args(args)
    if found.config:
        config = _from_files(config, found.config, args)
    cls: type[T] = class_of(config)
    args = [_in_full(word, cls) for word in args]
    if opened := _opened(cls, args):
        required = {f"--{_dashed(name)}" for name in required_fields(cls)}
        if isinstance(config, type) and required <= {*_flags_in(args)}:
            config = _from_files(config, [], args)
        if not isinstance(config, type):
            config, args = _with_sections(config, args, opened)
    default: dict[str, Any] = {} if isinstance(config, type) else {"default": config}
    parsed: T = tyro.cli(cls, args=args, config=how, compact_help=True, **default)
    if not isinstance(config, type):
        parsed.callbacks = config.callbacks  # tyro would build an empty collection
    return parsed


def _from_files(config: T | type[T], files: Sequence[str], args: Sequence[str]) -> T:
    """A class's fields without default may come as flags, which count over the files."""
    if not isinstance(config, type):
        return load_config(config, *files)
    types, given = field_types(config), _flags_in(args)
    named = [(name, types[name]) for name in required_fields(config) if f"--{_dashed(name)}" in given]
    words = [word for word in args if word not in _HELP]
    required: type[Any] = make_dataclass("Required", named)
    found, _ = tyro.cli(required, args=words, return_unknown_args=True)
    return load_config(config, *files, **vars(found))


def _opened(cls: type, args: Sequence[str]) -> list[Field[Any]]:
    """The sections, a dataclass or None, that `args` have flags into."""
    types = field_types(cls)
    optional = {}
    for f in fields(cls):
        parts = members(types[f.name])
        if len(parts) == 2 and NoneType in parts and any(map(is_dataclass, parts)):
            optional[_dashed(f.name)] = f
    sections = {flag.removeprefix("--").partition(".")[0] for flag in _flags_in(args)}
    return [field for name, field in optional.items() if name in sections]


def _with_sections(config: T, args: Sequence[str], opened: list[Field[Any]]) -> tuple[T, list[str]]:
    """`config` with a section, with its defaults, for each that was None, and None for `--section None`, which goes."""
    rest = list(args)
    changes: dict[str, Any] = {}
    for field in opened:
        flag, words = f"--{_dashed(field.name)}", _flags_in(rest)
        at = words.index(flag) if flag in words else len(rest)
        if rest[at + 1 : at + 2] == ["None"]:
            del rest[at : at + 2]
            changes[field.name] = None
        elif any(word.startswith(f"{flag}.") for word in words):
            section = section_of(config, field)
            if isinstance(section, type) and not required_fields(section):
                changes[field.name] = section()
    return replace(config, **changes), rest


def _in_full(word: str, cls: type) -> str:
    """A flag under the field's own names: `--training.max-steps` as `--training_parameters.max_steps`."""
    flag, equals, value = word.partition("=")
    if not flag.startswith("--"):
        return word
    section, dot, rest = flag.removeprefix("--").replace("-", "_").partition(".")
    section = field_meant(cls, section)
    for f in fields(cls) if dot else ():
        if f.name == section and isinstance(f.default_factory, type):
            (rest,) = with_new_names(f.default_factory, {rest: None})
    return f"--{_dashed(section)}{dot}{_dashed(rest)}{equals}{value}"


def _flags_in(args: Sequence[str]) -> list[str]:
    return [_dashed(word.partition("=")[0]) for word in args]


def _dashed(name: str) -> str:
    return name.replace("_", "-")
