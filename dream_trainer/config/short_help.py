"""`--help` of a trainer's script: the user's own fields and those that most runs set; `--help-all` has every one."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from functools import cache
from itertools import pairwise
from typing import Any

from dream_trainer.config.config_files import section_of
from dream_trainer.config.trainer_config import BaseTrainerConfig

OF_THE_RUN = ("project", "group", "experiment", "seed")
OF_MOST_RUNS: dict[str, tuple[str, ...]] = {
    "training_parameters": (
        "n_epochs",
        "max_steps",
        "train_batch_size",
        "val_batch_size",
        "global_batch_size",
        "gradient_accumulation_steps",
        "gradient_clip_val",
        "val_every_n_steps",
        "fast_dev_run",
    ),
    "device_parameters": ("device", "precision", "dp_shard", "tensor_parallel"),
    "checkpoint_parameters": ("save_every_n_steps", "keep_last", "best_metric", "best_mode", "resume", "init_from"),
    "logger_parameters": ("loggers", "log_every_n_steps"),
}
"""Of each section the fields that are shown."""

_INDENT = 6


def short_help(config: BaseTrainerConfig | type[BaseTrainerConfig], program: str) -> str:
    """The text: names, groups of flags with one line of meaning and the default, and how to see the rest."""
    cls = config if isinstance(config, type) else type(config)
    lines = [f"usage: {program} [--config FILE ...] [--FIELD VALUE ...]", "", "the run:"]
    lines += _flags(config, cls, OF_THE_RUN)
    shown = {*OF_THE_RUN, *OF_MOST_RUNS, "callbacks"}
    own = [f for f in fields(cls) if f.name not in shown and not _defining(cls, f.name).startswith("dream_trainer.")]
    if own:
        lines += ["", f"{cls.__name__}:"]
    for f in own:
        inner = section_of(config, f)
        if inner is None:
            lines += _flags(config, cls, (f.name,))
        else:
            parts = ", ".join(_flag(part.name) for part in fields(inner) if part.init)
            none = "" if _value(config, f) is not None else " [None]"
            lines += _entry(f"--{_flag(f.name)}.*", f"{_meaning(cls, f.name)} Its fields: {parts}.{none}".strip())
    for section, names in OF_MOST_RUNS.items():
        of_section = {f.name: f for f in fields(cls)}.get(section)
        if of_section is not None:
            value = section_of(config, of_section)
            inner = value if isinstance(value, type) else type(value)
            known = {f.name for f in fields(inner)}
            lines += ["", f"{section.replace('_', ' ')}:"]
            lines += _flags(value, inner, tuple(name for name in names if name in known), f"{_flag(section)}.")
    lines += [
        "",
        "  --config FILE: from a .yaml, .toml or .json file, or another run's directory; flags count over it.",
        "  --help-all: every field.",
    ]
    return "\n".join(lines)


def _flags(values: Any, cls: type, names: tuple[str, ...], prefix: str = "") -> Iterator[str]:
    for name in names:
        value = _value(values, next(f for f in fields(cls) if f.name == name))
        default = "[required]" if value is MISSING else f"[{value}]"
        yield from _entry(f"--{prefix}{_flag(name)}", f"{_meaning(cls, name)} {default}".strip())


def _value(values: Any, field: Field[Any]) -> Any:
    """What a field is of an instance, or by default of a class; MISSING if it has none."""
    if not isinstance(values, type):
        return vars(values)[field.name]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _entry(flag: str, text: str) -> list[str]:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    indent = " " * _INDENT
    return [
        f"  {flag}",
        *textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False),
    ]


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _defining(cls: type, name: str) -> str:
    """The module of the class that has the field first."""
    return next(part.__module__ for part in cls.__mro__ if name in vars(part).get("__annotations__", {}))


def _meaning(cls: type, name: str) -> str:
    """The first sentence of the line below the field, in the nearest class that has one."""
    texts = [_texts(part).get(name) for part in cls.__mro__ if name in vars(part).get("__annotations__", {})]
    text = " ".join(next(filter(None, texts), "").split())
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


@cache
def _texts(cls: type) -> dict[str, str]:
    """The string below each field in the source of a class; none where there is no source, as in a notebook."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    found = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, below in pairwise(statements):
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
            found[field.target.id] = text
    return found
