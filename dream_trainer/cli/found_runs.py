"""The runs under a directory, read from what each of them keeps about itself."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dream_trainer.checkpoint.files import step_directories
from dream_trainer.checkpoint.manifest import MANIFEST_NAME
from dream_trainer.cli.run_config import read_config
from dream_trainer.errors import ConfigError
from dream_trainer.loggers.interface import Stamp
from dream_trainer.trainer.run_record import CONFIG_NAME, RECORD_NAME, RunRecord, is_alive, read_record

DEPTH = 3
"""Levels below the directory of runs: project, group, experiment."""
LOG_NAME = "metrics.jsonl"
_LAST_BYTES = 1 << 14


@dataclass(kw_only=True)
class ListedRun:
    """A run as the list shows it."""

    name: str
    """Its path below the directory that is listed."""
    path: Path
    state: str
    """As in the record; "dead": it says "running", and nothing runs; "unknown": it runs, or ran, on another host."""
    record: RunRecord
    config: dict[str, Any]
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The newest value of each metric, with its step."""
    best: dict[str, Any] | None = None
    """The metric shown: its name, value and step, and either the mode by which it is best or that it is the last."""


def run_directories(root: Path) -> list[Path]:
    """The directories at or below `root` that a run has written to; none is looked for inside of a run."""
    found = []
    for place, directories, files in os.walk(root, followlinks=True):
        path = Path(place)
        directories.sort()
        if {RECORD_NAME, CONFIG_NAME, LOG_NAME}.intersection(files) or _has_checkpoints(path):
            found.append(path)
            directories.clear()
        elif len(path.relative_to(root).parts) >= DEPTH:
            directories.clear()
    return found


def _has_checkpoints(path: Path) -> bool:
    """Whether these are a run's, and not runs of a group that is named so."""
    return any((entry / MANIFEST_NAME).exists() for _, entry in step_directories(path / "checkpoints"))


def read_listed(path: Path, root: Path) -> ListedRun:
    """What is known of the run at `path`, below `root`."""
    record = read_record(path)
    try:
        config = read_config(path)
    except ConfigError:
        config = {}
    state = "-"  # of a version that kept no record
    if record is not None:
        alive = is_alive(path, record) if record.state == "running" else True
        state = record.state if alive else "dead" if alive is False else "unknown"
    record = record or RunRecord()
    last = {name: {"value": value, "step": record.step} for name, value in record.metrics.items()}
    name = path.relative_to(root).as_posix()
    run = ListedRun(name=path.name if name == "." else name, path=path, state=state, record=record, config=config)
    run.last = last | _follow_the_log(record, path / LOG_NAME)
    return run


def _follow_the_log(record: RunRecord, file: Path) -> dict[str, dict[str, Any]]:
    """The last values that were logged; they may be of later steps than the last validation or save."""
    found: dict[str, dict[str, Any]] = {}
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = log.read().split(b"\n")[:-1]  # the last may still be written
    except OSError:
        return found
    for text in lines:
        try:
            line = json.loads(text)
            step, seen = int(line["step"]), float(line["time"])
        except (ValueError, KeyError, TypeError):  # the first may begin before what was read
            continue
        record.step, record.seen = max(record.step, step), max(record.seen, seen)
        for name, value in line.items():
            if name not in Stamp._fields and isinstance(value, int | float):
                found[name] = {"value": float(value), "step": step}
    return found
