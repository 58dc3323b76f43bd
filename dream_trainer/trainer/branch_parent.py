"""Which checkpoint a run began from, as the checkpoints of the run tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dream_trainer.checkpoint.manifest import Manifest, list_checkpoints, read_manifest
from dream_trainer.errors import CheckpointError
from dream_trainer.stores.store_path import as_path


def run_name(manifest: Manifest) -> str:
    """Project, group and experiment of the run that wrote a checkpoint, wherever it lies now."""
    return "/".join(str(manifest.config.get(name)) for name in ("project", "group", "experiment"))


def began_at(parent: dict[str, Any], place: Path) -> bool:
    """Whether a path names the checkpoint that a run began from, or the run of it: by place, or moved since."""
    if as_path(parent["checkpoint"]).resolve().is_relative_to(place.resolve()):
        return True
    try:
        if is_run := (place / "checkpoints").is_dir():
            found = list_checkpoints(place / "checkpoints")[-1]
        else:
            found = read_manifest(place)
    except (CheckpointError, IndexError):
        return False
    # A branch of before this name was kept has none.
    return parent.get("run") == run_name(found) and (is_run or parent["step"] == found.step)
