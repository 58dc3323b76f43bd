"""Which file a path on the command line means, and what a run's own `config.json` gives to another run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dream_trainer.config.file_formats import read_plain
from dream_trainer.errors import ConfigError

SAVED_NAME = "config.json"
RECORD_NAME = "run.json"  # lies beside it in a run's directory
_NAMES = ("project", "group", "experiment")
# What a saved config says of its own run: where it lies, how it began, and the record of what is code: its callbacks,
# and what a trainer without a class was given.
_OF_THAT_RUN = (*_NAMES, "runs_dir", "callbacks", "given_objects")
_HOW_IT_BEGAN = ("resume", "branch")

logger = logging.getLogger(__name__)


def read_changes(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file that `path` means, and the fields that it sets, as plain values.

    Of what a run saved, wherever it lies now, everything is taken but what it says of that run.

    Raises:
        ConfigError: There is no such file, or it does not hold fields.
    """
    file = config_file(path)
    found = read_plain(file)
    if found is None:
        return file, {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}. Write fields and their values.")
    in_its_place = path.is_dir() or (file.name == SAVED_NAME and (file.parent / RECORD_NAME).exists())
    if not in_its_place and not is_saved(found):
        return file, found
    kept, left_out = _without_that_run(found)
    # Who copied it may have written other names into it, and would wait for them.
    level = logging.INFO if in_its_place else logging.WARNING
    logger.log(level, "%s is what a run saved; left out: %s.", file, ", ".join(left_out))
    return file, kept


def config_file(path: Path) -> Path:
    """The file that a path means: itself, or of a run's directory its `config.json`.

    Raises:
        ConfigError: It is another directory; with the run's, where that is known.
    """
    if not path.is_dir() or (path / SAVED_NAME).exists():
        return path / SAVED_NAME if path.is_dir() else path
    above = [parent for parent in path.absolute().parents[:2] if (parent / SAVED_NAME).exists()]
    below = sorted(path.glob(f"*/{SAVED_NAME}")) or sorted(path.glob(f"*/*/{SAVED_NAME}"))
    advice = "Give a run's directory, or a file."
    if above:
        advice = f"The run's is {path.parent if above[0] == path.absolute().parent else above[0]}/{SAVED_NAME}."
    elif below:
        advice = f"It has {len(below)} runs: give one, such as {below[0].parent}."
    raise ConfigError(f"{path} has no {SAVED_NAME}. {advice}")


def is_saved(config: dict[str, Any]) -> bool:
    """Whether a file is what a run saved: it has the record of the run's callbacks, which nobody else can write."""
    return isinstance(config.get("callbacks"), list) and all(name in config for name in _NAMES)


def _without_that_run(saved: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What is left, and the names of what is not."""
    left_out = [name for name in _OF_THAT_RUN if name in saved]
    kept = {name: value for name, value in saved.items() if name not in _OF_THAT_RUN}
    if isinstance(checkpoints := kept.get("checkpoint_parameters"), dict):
        left_out += [f"checkpoint_parameters.{name}" for name in _HOW_IT_BEGAN if name in checkpoints]
        kept["checkpoint_parameters"] = {n: value for n, value in checkpoints.items() if n not in _HOW_IT_BEGAN}
    return kept, left_out
