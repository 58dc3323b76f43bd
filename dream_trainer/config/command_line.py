"""Any config as a command line: `--training.n-epochs 3`, or in full `--training-parameters.n-epochs 3`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import tyro

from dream_trainer.config.config_files import changed, class_of, field_meant, field_types, read_changes
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
        # Fields without a text form are hidden; of one that may be None tyro would make a subcommand, if it can.
        how = (tyro.conf.SuppressFixed, tyro.conf.AvoidSubcommands)
        of_files = ArgumentParser(add_help=False, allow_abbrev=False)
        of_files.add_argument("--config", action="append", default=[], metavar="FILE")
        found, words = of_files.parse_known_args(sys.argv[1:] if args is None else args)
        cls: type[T] = class_of(config)
        sections, words = _sections(cls, [_in_full(word, cls) for word in words])
        if found.config or sections:
            changes = [*(read_changes(Path(file)) for file in found.config), (Path("the command line"), sections)]
            config = changed(config, changes, _required(config, words) if isinstance(config, type) else {})
        default: dict[str, Any] = {} if isinstance(config, type) else {"default": config}
        parsed: T = tyro.cli(cls, args=words, config=how, compact_help=True, **default)
        if not isinstance(config, type):
            parsed.callbacks = config.callbacks  # tyro would build an empty collection
        return parsed
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _required(cls: type, args: Sequence[str]) -> dict[str, Any]:
    """A class's fields without default that come as flags, which count over the files."""
    types, given = field_types(cls), _flags_in(args)
    without = [f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]
    named = [(name, types[name]) for name in without if f"--{_dashed(name)}" in given]
    words = [word for word in args if word not in _HELP]
    required: type[Any] = make_dataclass("Required", named)
    found, _ = tyro.cli(required, args=words, return_unknown_args=True)
    return dict(vars(found))


def _sections(cls: type, args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Sections that may be None: {} for those with flags into them, and None for `--section None`, which goes."""
    types, sections = field_types(cls), dict[str, Any]()
    for f in fields(cls):
        parts, flag, words = members(types[f.name]), f"--{_dashed(f.name)}", _flags_in(args)
        if len(parts) == 2 and NoneType in parts and any(map(is_dataclass, parts)):
            at = words.index(flag) if flag in words else len(args)
            if args[at + 1 : at + 2] == ["None"]:
                args = args[:at] + args[at + 2 :]
                sections[f.name] = None
            elif any(word.startswith(f"{flag}.") for word in words):
                sections[f.name] = {}
    return sections, args


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
