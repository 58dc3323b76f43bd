"""Any config as a command line: `--training.n-epochs 3`, or in full `--training-parameters.n-epochs 3`."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, make_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import tyro

from dream_trainer.checks import nearest, refuse
from dream_trainer.config.config_files import (
    class_of,
    field_meant,
    field_types,
    load_config,
    required_fields,
    section_of,
    value_of,
)
from dream_trainer.config.parameter_class import declaring, is_ours, members, with_new_names
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError
from dream_trainer.screen import is_in_notebook

T = TypeVar("T", bound=BaseTrainerConfig)
# Meanings that spelling by itself would not find, or not first.
_SYNONYMS = {"learning-rate": "lr", "lr": "learning-rate", "batch-size": "train-batch-size"}
_SYNONYMS |= {"tp": "tensor-parallel", "cp": "context-parallel", "pp": "pipeline-parallel", "ep": "expert-parallel"}


def parse(config: T | type[T], args: Sequence[str] | None = None) -> T:
    """Builds a config from command-line arguments. `--help` shows your own fields and the most common ones,
    `--help-all` every one.

    A flag into a section that is None builds it with its defaults, and `--section None` drops it.
    `--config FILE`, given once or several times, is read first, as by `load_config`; other arguments override files.
    Callbacks are code and not on the command line: they stay as in the given instance, or at the class's default.

    Args:
        config: An instance, whose values are the defaults, or a class, whose fields without default are then required.
        args: The arguments. None takes `sys.argv[1:]`, or none in a notebook, whose arguments are the kernel's.

    Raises:
        SystemExit: With code 2 after a message on stderr, if an argument is unknown or a value is invalid; with code 0
            after `--help` or `--help-all`.
    """
    if args is None and is_in_notebook():
        args = []
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
    args = [_in_full(word, config if isinstance(config, type) else type(config)) for word in args]
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


def _take_files(args: Sequence[str]) -> tuple[list[str], list[str]]:
    files: list[str] = []
    others: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--config":
            file = next(words, "--")
            refuse(file.startswith("--"), "--config names no file. Use --config run.yaml.")
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
    """The sections, a dataclass or None, that `args` have flags into; none in tyro's own way, `section:type`."""
    types = field_types(cls)
    optional = {}
    for f in fields(cls):
        parts = members(types[f.name])
        if len(parts) == 2 and NoneType in parts and any(map(is_dataclass, parts)):
            optional[_dashed(f.name)] = f
    if any(word.startswith(f"{name}:") for word in args for name in optional):
        return []
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


def _about_unknown(config: Any, word: str) -> str:
    """Advice about the first argument that tyro did not accept."""
    if not word.startswith("--"):
        return (
            f"{word!r} belongs to no flag. Write --FIELD VALUE; for a boolean --FIELD or --no-FIELD, and in a section "
            "--SECTION.FIELD or --SECTION.no-FIELD."
        )
    first, dot, rest = _spelled(word).removeprefix("--").partition(".")
    negative = "no-" if dot and first.startswith("no-") else ""  # it belongs before the field
    name = _dashed(short_name(config, first.removeprefix(negative).replace("-", "_")))
    flag = f"--{negative}{name}{dot}{rest}"
    section, dot, last = f"{name}{dot}{rest}".rpartition(".")
    last = f"{negative}{last}"
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
            section = section_of(start, field)
            name = field.name if section is None else short_name(start, field.name)
            flag = f"{prefix}{_dashed(name)}"
            yield from (flag,) if section is None else _flags(section, f"{flag}.")
            if field_types(class_of(start))[field.name] is bool:
                yield f"{prefix}no-{_dashed(name)}"


def short_name(start: Any, section: str) -> str:
    """How a section is called in a flag: `training` for `training_parameters`, unless another field is."""
    short = section.removesuffix("_parameters")
    cls = start if isinstance(start, type) else type(start)
    return short if field_meant(cls, short) == section else section


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
    return [_spelled(word) for word in args]


def _spelled(word: str) -> str:
    return _dashed(word.partition("=")[0])


def _dashed(name: str) -> str:
    return name.replace("_", "-")


# Of each section the fields that short help shows.
OF_THE_RUN = ("project", "group", "experiment", "seed")
OF_MOST_RUNS: dict[str, tuple[str, ...]] = {
    "training_parameters": tuple(
        "n_epochs max_steps train_batch_size val_batch_size global_batch_size gradient_accumulation_steps "
        "gradient_clip_norm val_every_n_steps fast_dev_run".split()
    ),
    "device_parameters": ("device", "precision", "dp_shard", "tensor_parallel"),
    "checkpoint_parameters": ("save_every_n_steps", "keep_last", "best_metric", "best_mode", "resume", "init_from"),
    "logger_parameters": ("loggers", "log_every_n_steps"),
}


def short_help(config: BaseTrainerConfig | type[BaseTrainerConfig], program: str) -> str:
    """The text: names, groups of flags with one line of meaning and the default, and how to see the rest."""
    cls = config if isinstance(config, type) else type(config)
    by_name = {f.name: f for f in fields(cls)}
    lines = [f"usage: {program} [--config FILE ...] [--FIELD VALUE ...]", "", "the run:"]
    lines += _shown_flags(config, OF_THE_RUN)
    shown = {*OF_THE_RUN, *OF_MOST_RUNS, "callbacks"}
    own = [f for f in by_name.values() if f.name not in shown and not is_ours(declaring(cls, f.name)[0])]
    lines += ["", f"{cls.__name__}:"] if own else []
    for f in own:
        inner = section_of(config, f)
        if inner is None:
            lines += _shown_flags(config, (f.name,))
        else:
            parts = ", ".join(part.name.replace("_", "-") for part in fields(inner) if part.init)
            none = "" if value_of(config, f) is not None else " [None]"
            lines += _entry(f"{short_name(config, f.name)}.*", f"{_meaning(cls, f.name)} Its fields: {parts}.{none}")
    for section, names in OF_MOST_RUNS.items():
        if section in by_name:
            lines += [
                "",
                f"{section.replace('_', ' ')}:",
                *_shown_flags(section_of(config, by_name[section]), names, f"{short_name(config, section)}."),
            ]
    return "\n".join(
        [
            *lines,
            "",
            "  --config FILE: from a .yaml, .toml or .json file, or another run's directory; flags count over it.",
            "  --help-all: every field.",
        ]
    )


def _shown_flags(values: Any, names: Sequence[str], prefix: str = "") -> list[str]:
    """Entries of the named fields of a dataclass or its instance, without those that it lacks."""
    lines = []
    for f in sorted((f for f in fields(values) if f.name in names), key=lambda f: names.index(f.name)):
        value = value_of(values, f)
        meaning = _meaning(values if isinstance(values, type) else type(values), f.name)
        lines += _entry(f"{prefix}{f.name}", f"{meaning} [{'required' if value is MISSING else value}]")
    return lines


def _entry(name: str, text: str) -> list[str]:
    width, indent = max(60, min(120, shutil.get_terminal_size().columns)), " " * 6
    wrapped = textwrap.wrap(
        text.strip(), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return [f"  --{name.replace('_', '-')}", *wrapped]


def _meaning(cls: type, name: str) -> str:
    """The first sentence of the line below the field, in the nearest class that has one."""
    texts = [_texts(part).get(name) for part in declaring(cls, name)]
    first, dot, _ = " ".join(next(filter(None, texts), "").split()).partition(". ")
    return first + dot.strip()


@cache
def _texts(cls: type) -> dict[str, str]:
    """The string below each field in the source of a class; none where there is no source, as in a notebook."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    found = {}
    for field, below in pairwise(body.body if isinstance(body, ast.ClassDef) else ()):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found
