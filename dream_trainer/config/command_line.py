"""Any config as a command line: `--training-parameters.n-epochs 3`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, TypeVar

import tyro

from dream_trainer.checks import nearest
from dream_trainer.config.config_files import field_types, load_config, required_fields, section_of
from dream_trainer.config.parameter_class import members
from dream_trainer.config.short_help import short_help
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError
from dream_trainer.screen import is_in_notebook

T = TypeVar("T", bound=BaseTrainerConfig)
_PACKAGE = Path(__file__).parent.parent
# Meanings that spelling alone would not find, or not first.
_SYNONYMS = {"learning-rate": "lr", "lr": "learning-rate", "batch-size": "train-batch-size"}
_SYNONYMS |= {"tp": "tensor-parallel", "cp": "context-parallel", "pp": "pipeline-parallel", "ep": "expert-parallel"}


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
    if args is None and is_in_notebook():
        args = []
    if args is None and sys.excepthook is sys.__excepthook__:  # debuggers and notebooks keep their own
        sys.excepthook = _end_in_a_line
    try:
        return _parsed(config, sys.argv[1:] if args is None else args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _parsed(config: T | type[T], args: Sequence[str]) -> T:
    how: tuple[Any, ...] = (tyro.conf.SuppressFixed,)  # hides fields that have no text form
    files, args = _take_files(args)
    if files:
        config = _from_files(config, files, args)
    if "--help" in args or "-h" in args:
        print(short_help(config, Path(sys.argv[0]).name))
        raise SystemExit(0)
    args = ["--help" if word == "--help-all" else word for word in args]
    cls = config if isinstance(config, type) else type(config)
    if opened := _opened(cls, args):
        required = {f"--{_dashed(name)}" for name in required_fields(cls)}
        if isinstance(config, type) and required <= {*_flags_in(args)}:
            config = _from_files(config, [], args)
        if not isinstance(config, type):
            how = (*how, tyro.conf.AvoidSubcommands)  # tyro makes one of a section that may be None
            config, args = _with_sections(config, args, opened)
    default: dict[str, Any] = {} if isinstance(config, type) else {"default": config}
    parsed: T
    parsed, unknown = tyro.cli(cls, args=args, config=how, return_unknown_args=True, **default)
    if unknown:
        raise ConfigError(_about_unknown(config, unknown[0]))
    if not isinstance(config, type):
        parsed.callbacks = config.callbacks  # tyro would build an empty collection
    return parsed


def _end_in_a_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows a ConfigError as one line and exits with code 2, as a wrong flag does; others with their traceback."""
    if not isinstance(error, ConfigError):
        sys.__excepthook__(kind, error, trace)
        return
    users = [frame for frame in traceback.extract_tb(trace) if not Path(frame.filename).is_relative_to(_PACKAGE)]
    place = f" ({users[-1].filename}:{users[-1].lineno}, in {users[-1].name})" if users else ""
    print(f"error: {' '.join(str(error).split())}{place}", file=sys.stderr)
    raise SystemExit(2)


def _take_files(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of `--config`, and the other arguments."""
    files: list[str] = []
    others: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--config":
            file = next(words, "--")
            if file.startswith("--"):
                raise ConfigError("--config names no file. Use --config run.yaml.")
            files.append(file)
        elif word.startswith("--config="):
            files.append(word.removeprefix("--config="))
        else:
            others.append(word)
    return files, others


def _from_files(config: T | type[T], files: list[str], args: list[str]) -> T:
    """A class's fields without default may come as flags, which count over the files."""
    if not isinstance(config, type):
        return load_config(config, *files)
    types, given = field_types(config), _flags_in(args)
    named = [(name, types[name]) for name in required_fields(config) if f"--{_dashed(name)}" in given]
    words = [word for word in args if word not in ("-h", "--help", "--help-all")]
    required: type[Any] = make_dataclass("Required", named)
    found, _ = tyro.cli(required, args=words, return_unknown_args=True)
    return load_config(config, *files, **vars(found))


def _opened(cls: type, args: Sequence[str]) -> list[Field[Any]]:
    """The fields for one kind of dataclass or None that `args` have flags into, or name.

    If one is chosen in tyro's own way, `section:type`, flags belong behind that, and there are none.
    """
    types = field_types(cls)
    optional = {_dashed(f.name): f for f in fields(cls) if _is_optional_section(types[f.name])}
    if any(word.startswith(f"{name}:") for word in args for name in optional):
        return []
    sections = {flag.removeprefix("--").partition(".")[0] for flag in _flags_in(args)}
    return [field for name, field in optional.items() if name in sections]


def _is_optional_section(annotation: Any) -> bool:
    parts = members(annotation)
    return len(parts) == 2 and NoneType in parts and any(is_dataclass(part) for part in parts)


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


def _about_unknown(config: Any, word: str) -> str:
    """What to do about the first word that tyro had no use for."""
    if not word.startswith("--"):
        return f"{word!r} belongs to no flag. Write --FIELD VALUE, or --FIELD and --no-FIELD for a boolean."
    flag = _spelled(word)
    section, dot, last = flag.removeprefix("--").rpartition(".")
    flags = list(_flags(config))
    for inside in (f"--{section}{dot}", "--"):
        among = {known.removeprefix("--").rpartition(".")[2]: known for known in reversed(flags) if inside in known}
        meant = [word for word in (last, _SYNONYMS.get(last), nearest(last, among)) if word in among]
        if meant and among[meant[0]] == flag:  # tyro makes a flag of each key of a dict
            return f"{flag} is a dict, and each of its keys has a flag. Write {flag}.KEY VALUE."
        if meant:
            return f"there is no flag {flag}. Did you mean {among[meant[0]]}?"
    return f"there is no flag {flag}. --help-all shows every one."


def _flags(start: Any, prefix: str = "--") -> Iterator[str]:
    for field in fields(start):
        if field.init and field.name != "callbacks":
            flag, section = f"{prefix}{_dashed(field.name)}", section_of(start, field)
            yield from (flag,) if section is None else _flags(section, f"{flag}.")


def _flags_in(args: Sequence[str]) -> list[str]:
    return [_spelled(word) for word in args]


def _spelled(word: str) -> str:
    return _dashed(word.partition("=")[0])


def _dashed(name: str) -> str:
    return name.replace("_", "-")
