"""What lies in the directory of a run's checkpoints: whole ones, and what else the command line shows of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dream_trainer.checkpoint.files import step_directories
from dream_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.stores.store_path import StorePath

State = Literal["whole", "damaged", "unreadable", "unfinished", "replaced", "aside"]

# What checkpoint/files.py names so: being written or left by a kill, set aside for a replacement, set aside for good.
_HIDDEN: dict[State, re.Pattern[str]] = {
    "unfinished": re.compile(r"\.step_(\d{8,})\.tmp-[0-9a-f]+"),
    "replaced": re.compile(r"\.step_(\d{8,})\.replaced-[0-9a-f]+"),
    "aside": re.compile(r"\.aside-[0-9a-f]+-step_(\d{8,})"),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One directory among a run's checkpoints."""

    path: Path
    step: int
    state: State
    """"unreadable" may well be whole: of a newer schema, or closed to this user. "unfinished" is being written, or was
    left by a killed job. "replaced" is kept until another of its step is whole; the next save sees to it. "aside" is of
    a branch that the run left when it went on from an older one."""
    fault: str | None = None
    """What is wrong with it."""
    manifest: Manifest | None = None
    """Where it can be read."""

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return directory_size(self.path)


def directory_size(path: Path) -> int:
    """Bytes of the files in a directory."""
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def entries(root: Path) -> list[Entry]:
    """All directories under `root` that are, were or were to be checkpoints, by step. Contents are not verified."""
    checkpoints = [_visible(step, path) for step, path in step_directories(root)]
    for path in root.iterdir():
        for state, pattern in _HIDDEN.items():
            if (match := pattern.fullmatch(path.name)) and path.is_dir():
                checkpoints.append(_hidden(int(match[1]), path, state))
    return sorted(checkpoints, key=lambda entry: (entry.step, entry.path.name.startswith("."), entry.path.name))


def _visible(step: int, path: Path) -> Entry:
    try:
        return Entry(path=path, step=step, state="whole", manifest=read_manifest(path))
    except DamagedCheckpointError as error:
        is_begun = isinstance(path, StorePath) and not (path / MANIFEST_NAME).is_file()  # written in place, that last
        return Entry(
            path=path,
            step=step,
            state="unfinished" if is_begun else "damaged",
            fault=None if is_begun else str(error),
        )
    except CheckpointError as error:
        return Entry(path=path, step=step, state="unreadable", fault=str(error))


def _hidden(step: int, path: Path, state: State) -> Entry:
    try:
        return Entry(path=path, step=step, state=state, manifest=read_manifest(path))
    except CheckpointError as error:
        return Entry(path=path, step=step, state=state, fault=None if state == "unfinished" else str(error))
