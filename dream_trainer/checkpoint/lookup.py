"""Which checkpoint a path means, be it of a run or of one of its checkpoints, and the checkpoints that a run has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dream_trainer.checkpoint.files import ASIDE_NAME, REPLACED_NAME, TEMPORARY_NAME, named_step, step_directories
from dream_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest, list_checkpoints, read_manifest
from dream_trainer.checks import refuse
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.stores.store_path import StorePath

State = Literal["whole", "damaged", "unreadable", "unfinished", "replaced", "aside"]
_HIDDEN: dict[State, re.Pattern[str]] = {"unfinished": TEMPORARY_NAME, "replaced": REPLACED_NAME, "aside": ASIDE_NAME}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One directory among a run's checkpoints."""

    path: Path
    step: int
    state: State
    # "unreadable": of a newer schema, or closed to this user. "unfinished": being written, or left by a killed job.
    # "replaced": kept until another of its step is whole. "aside": set aside when the run resumed from an older one.
    fault: str | None = None
    manifest: Manifest | None = None

    @property
    def size(self) -> int:
        return directory_size(self.path)


def directory_size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def entries(root: Path) -> list[Entry]:
    """All directories under `root` that are, were or were to be checkpoints, by step. Contents are not verified."""
    found = [_entry(path, step, "whole") for step, path in step_directories(root)]
    for path in root.iterdir():
        for state, pattern in _HIDDEN.items():
            if (match := pattern.fullmatch(path.name)) and path.is_dir():
                found.append(_entry(path, int(match[1]), state))
    return sorted(found, key=lambda entry: (entry.step, entry.path.name.startswith("."), entry.path.name))


def _entry(path: Path, step: int, state: State) -> Entry:
    try:
        return Entry(path=path, step=step, state=state, manifest=read_manifest(path))
    except CheckpointError as error:
        if state == "whole":
            state = "damaged" if isinstance(error, DamagedCheckpointError) else "unreadable"
        if state == "damaged" and isinstance(path, StorePath) and not (path / MANIFEST_NAME).is_file():
            state = "unfinished"  # written in place, the manifest last
        return Entry(path=path, step=step, state=state, fault=None if state == "unfinished" else str(error))


def checkpoints_root(path: Path) -> Path:
    """The directory of the checkpoints of a run's directory, or `path` itself if it is that."""
    refuse(not path.is_dir(), f"{path} is not a directory. Give a run's directory.", CheckpointError)
    if is_checkpoint(path):
        raise CheckpointError(f"{path} is one checkpoint. Give the run's directory, {path.parent.parent} perhaps.")
    if (path / "checkpoints").is_dir():
        return path / "checkpoints"
    if path.name == "checkpoints" or step_directories(path):
        return path
    raise CheckpointError(f"{path} has no checkpoints. Give a run's directory, such as runs/project/group/experiment.")


def is_checkpoint(path: Path) -> bool:
    return path.is_dir() and (named_step(path) is not None or (path / MANIFEST_NAME).exists())


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The checkpoint that a path means: itself, or of a run the one of `step`, by default the newest whole one."""
    if is_checkpoint(path):
        refuse(step is not None, f"step={step} chooses among a run's checkpoints, and {path} is one. Leave one out.")
        return path
    root = checkpoints_root(path)
    path_of_step = {manifest.step: manifest.path for manifest in list_checkpoints(root)}
    if step is None and path_of_step:
        return path_of_step[max(path_of_step)]
    if step not in path_of_step:
        asked = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
        raise CheckpointError(f"{root} has {asked}. There are steps {sorted(path_of_step)}.")
    return path_of_step[step]
