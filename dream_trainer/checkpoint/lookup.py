"""Which checkpoint a path means, be it of a run or of one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from dream_trainer.checkpoint.files import named_step, step_directories
from dream_trainer.checkpoint.manifest import MANIFEST_NAME, list_checkpoints
from dream_trainer.errors import CheckpointError, ConfigError


def checkpoints_root(path: Path) -> Path:
    """The directory of a run's checkpoints.

    Args:
        path: The run's directory or that directory itself.

    Raises:
        CheckpointError: It is neither.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory. Give a run's directory.")
    if is_checkpoint(path):
        raise CheckpointError(f"{path} is one checkpoint. Give the run's directory, {path.parent.parent} perhaps.")
    if (path / "checkpoints").is_dir():
        return path / "checkpoints"
    if path.name == "checkpoints" or step_directories(path):
        return path
    raise CheckpointError(f"{path} has no checkpoints. Give a run's directory, such as runs/project/group/experiment.")


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is, or is named as, a checkpoint."""
    return path.is_dir() and (named_step(path) is not None or (path / MANIFEST_NAME).exists())


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The checkpoint that a path means: itself, or of a run the one of `step`, by default the newest whole one.

    Raises:
        ConfigError: `step` was given with a path that is a checkpoint already.
        CheckpointError: There is none.
    """
    if is_checkpoint(path):
        if step is not None:
            raise ConfigError(f"step={step} chooses among a run's checkpoints, and {path} is one. Leave one out.")
        return path
    root = checkpoints_root(path)
    path_of_step = {manifest.step: manifest.path for manifest in list_checkpoints(root)}
    if step is None and path_of_step:
        return path_of_step[max(path_of_step)]
    if step not in path_of_step:
        asked = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
        raise CheckpointError(f"{root} has {asked}. There are steps {sorted(path_of_step)}.")
    return path_of_step[step]
