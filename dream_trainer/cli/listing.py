"""`checkpoints ls` and `verify`: what is there, and whether it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dream_trainer.callbacks.tables import print_table
from dream_trainer.checkpoint.lookup import checkpoints_root, is_checkpoint
from dream_trainer.checkpoint.manifest import read_manifest
from dream_trainer.cli.output import age_cell, described, mesh_cell, metrics_cell, print_json
from dream_trainer.cli.runs import Entry, entries
from dream_trainer.errors import CheckpointError
from dream_trainer.loggers.formatting import format_bytes


def ls(run: Path, *, as_json: bool) -> int:
    """Lists a run's checkpoints; returns the exit code."""
    root = checkpoints_root(run)
    checkpoints = entries(root)
    if as_json:
        print_json({"root": root, "checkpoints": [_record(entry) for entry in checkpoints]})
        return 0
    if not checkpoints:
        print(f"{root} has no checkpoints yet.")
        return 0
    header = ["step", "epoch", "samples", "metrics", "size", "ranks", "mesh", "age", "state"]
    print_table(str(root), header, [_row(entry) for entry in checkpoints])
    for entry in checkpoints:
        if entry.fault:
            print(f"{entry.path.name}: {entry.fault}")
    return 0


def _row(entry: Entry) -> list[str]:
    manifest = entry.manifest
    if manifest is None:
        return [str(entry.step), "-", "-", "-", format_bytes(entry.size), "-", "-", "-", entry.state]
    return [
        str(entry.step),
        str(manifest.epoch),
        f"{manifest.samples_seen:,}",
        metrics_cell(manifest.metrics),
        format_bytes(entry.size),
        str(manifest.world_size),
        mesh_cell(manifest.mesh_shape),
        age_cell(manifest.wall_time),
        entry.state,
    ]


def _record(entry: Entry) -> dict[str, Any]:
    record = {"step": entry.step, "path": entry.path, "state": entry.state, "fault": entry.fault, "size": entry.size}
    return record | (described(entry.manifest) if entry.manifest else {})


def verify(path: Path, *, as_json: bool) -> int:
    """Reads one checkpoint, or all of a run, through; returns the exit code, 1 if something is damaged."""
    if is_checkpoint(path):
        paths = [path]
    else:
        found = [entry for entry in entries(checkpoints_root(path)) if not entry.path.name.startswith(".")]
        paths = [entry.path for entry in found if entry.state != "unfinished"]
        if not paths:
            raise CheckpointError(f"{path} has no checkpoints to verify.")
    verdicts = {checkpoint: _faults(checkpoint) for checkpoint in paths}
    if as_json:
        reports = [{"path": at, "whole": not faults, "faults": faults} for at, faults in verdicts.items()]
        print_json({"whole": not any(verdicts.values()), "checkpoints": reports})
    else:
        for checkpoint, faults in verdicts.items():
            print(f"{checkpoint}: {'; '.join(faults) or 'whole'}")
    return 1 if any(verdicts.values()) else 0


def _faults(path: Path) -> list[str]:
    """What is wrong with a checkpoint: each file that is not as it was written."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    faults = []
    for name in sorted(manifest.files):
        try:
            manifest.verify(name)
        except CheckpointError as error:
            faults.append(str(error))
    return faults
