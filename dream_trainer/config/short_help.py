"""`--help` of a trainer's script: the user's own fields and those that most runs set; `--help-all` has every one."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import cache
from itertools import pairwise
from typing import Any

from dream_trainer.config.config_files import section_of, value_of
from dream_trainer.config.parameter_class import declaring, is_ours
from dream_trainer.config.trainer_config import BaseTrainerConfig

OF_THE_RUN = ("project", "group", "experiment", "seed")
OF_MOST_RUNS: dict[str, tuple[str, ...]] = {
    "training_parameters": tuple(
        "n_epochs max_steps train_batch_size val_batch_size global_batch_size gradient_accumulation_steps "
        "gradient_clip_val val_every_n_steps fast_dev_run".split()
    ),
    "device_parameters": ("device", "precision", "dp_shard", "tensor_parallel"),
    "checkpoint_parameters": ("save_every_n_steps", "keep_last", "best_metric", "best_mode", "resume", "init_from"),
    "logger_parameters": ("loggers", "log_every_n_steps"),
}
"""Of each section the fields that are shown."""


def short_help(config: BaseTrainerConfig | type[BaseTrainerConfig], program: str) -> str:
    """The text: names, groups of flags with one line of meaning and the default, and how to see the rest."""
    cls = config if isinstance(config, type) else type(config)
    by_name = {f.name: f for f in fields(cls)}
    lines = [f"usage: {program} [--config FILE ...] [--FIELD VALUE ...]", "", "the run:"]
    lines += _flags(config, OF_THE_RUN)
    shown = {*OF_THE_RUN, *OF_MOST_RUNS, "callbacks"}
    own = [f for f in by_name.values() if f.name not in shown and not is_ours(declaring(cls, f.name)[0])]
    lines += ["", f"{cls.__name__}:"] if own else []
    for f in own:
        inner = section_of(config, f)
        if inner is None:
            lines += _flags(config, (f.name,))
        else:
            parts = ", ".join(part.name.replace("_", "-") for part in fields(inner) if part.init)
            none = "" if value_of(config, f) is not None else " [None]"
            lines += _entry(f"{f.name}.*", f"{_meaning(cls, f.name)} Its fields: {parts}.{none}")
    for section, names in OF_MOST_RUNS.items():
        if section in by_name:
            lines += [
                "",
                f"{section.replace('_', ' ')}:",
                *_flags(section_of(config, by_name[section]), names, f"{section}."),
            ]
    return "\n".join(
        [
            *lines,
            "",
            "  --config FILE: from a .yaml, .toml or .json file, or another run's directory; flags count over it.",
            "  --help-all: every field.",
        ]
    )


def _flags(values: Any, names: Sequence[str], prefix: str = "") -> list[str]:
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
