"""`config show` and `config diff`: what runs were started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dream_trainer.callbacks.tables import print_table
from dream_trainer.checkpoint.lookup import find_checkpoint, is_checkpoint
from dream_trainer.checkpoint.manifest import read_manifest
from dream_trainer.cli.output import print_json
from dream_trainer.cli.what_trained import trained_leaves
from dream_trainer.config.file_formats import read_plain
from dream_trainer.config.saved_config import is_saved
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.trainer.run_record import CONFIG_NAME, read_record

ABSENT = "-"


def read_config(path: Path) -> dict[str, Any]:
    """The config that a path means: a run's, a file's, or that of a checkpoint.

    Raises:
        ConfigError: There is none.
    """
    if is_checkpoint(path):
        return read_manifest(path).config
    file = path / CONFIG_NAME if path.is_dir() else path
    if not file.exists():
        return _of_newest_checkpoint(path, file)
    config = read_plain(file)
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no config but a {type(config).__name__}. Give a run's directory.")
    return config


def _of_newest_checkpoint(path: Path, file: Path) -> dict[str, Any]:
    """Older versions wrote no `config.json` without a logger, but checkpoints have always kept the config."""
    try:
        return read_manifest(find_checkpoint(path)).config
    except CheckpointError:
        raise ConfigError(
            f"{file} is not there. Give a run's directory, such as runs/project/group/experiment."
        ) from None


def show_config(path: Path, *, as_json: bool) -> int:
    """Prints a config; returns the exit code."""
    config = read_config(path)
    if as_json:
        print_json(config)
    else:
        values = trained_leaves(config, read_record(path))
        print_table(str(path), [], [[name, value_cell(value)] for name, value in values.items()])
    return 0


def diff_configs(a: Path, b: Path, *, as_json: bool) -> int:
    """Prints the fields that differ, between a run and a file those that the file names; returns 1 if some do."""
    configs = read_config(a), read_config(b)
    first, second = (trained_leaves(config, read_record(path)) for config, path in zip(configs, (a, b), strict=True))
    names = dict.fromkeys([*first, *second])
    if is_saved(configs[0]) != is_saved(configs[1]):
        names = dict.fromkeys(second if is_saved(configs[0]) else first)
    rows = [
        (name, first.get(name, ABSENT), second.get(name, ABSENT))
        for name in names
        if name not in first or name not in second or repr(first[name]) != repr(second[name])
    ]
    if as_json:
        print_json({name: [first.get(name), second.get(name)] for name, _, _ in rows})
    elif rows:
        print_table(
            f"a: {a}\nb: {b}", ["field", "a", "b"], [[name, value_cell(x), value_cell(y)] for name, x, y in rows]
        )
    else:
        print(f"the configs of {a} and {b} are the same")
    return 1 if rows else 0


def value_cell(value: Any) -> str:
    """A value as one reads it: text without quotes, containers as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str) if value is not None else "None"
