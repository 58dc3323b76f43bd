"""`run.json`: what a run says about itself, for whoever looks later: how far it is, how it goes, why it ended.

It is in the run's directory beside `config.json`, and replaced whole. RunRecorder writes it; `dream-trainer runs` reads
it.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dream_trainer.checkpoint.run_directory import is_claimed
from dream_trainer.loggers.line_files import json_ready, replace_file

RECORD_NAME = "run.json"
CONFIG_NAME = "config.json"

RunState = Literal["running", "stopped", "finished", "failed"]


@dataclass(kw_only=True)
class RunRecord:
    """A run at the last moment at which it wrote this down: its start, a validation, a checkpoint, its end."""

    state: RunState = "running"
    """"stopped": asked to, by code, a signal or `max_time`, before its limits; "finished": it reached them."""
    why: str | None = None
    """Why it was stopped, or the line of the exception that it failed with."""
    failed_rank: int | None = None
    """Of a failed run: the rank whose failure came first; None where nobody knows it."""
    error: str | None = None
    """Of a failed run: the exception with all that it says, its place, and the calls that led there."""
    started: float = 0.0
    """When it was first started, in seconds since 1970."""
    seen: float = 0.0
    """When this was written."""
    starts: int = 0
    """How often training was started or went on in a new process."""
    step: int = 0
    """Optimizer steps completed."""
    epoch: int = 0
    """Epochs completed."""
    samples: int = 0
    """Samples consumed by all ranks."""
    seconds: float = 0.0
    """Of training, all processes together."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last validation."""
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each metric whose best is kept: its `value`, the `step` of that, and the `mode`, "min" or "max"."""
    parent: dict[str, Any] | None = None
    """Of a branch: the `checkpoint` that it began from, its `step`, and what went along."""
    resumed_from: str | None = None
    """The checkpoint that the last process went on from: the run's, another run's, or one in a `local_directory`."""
    kept_options: list[dict[str, Any]] = field(default_factory=list)
    """Options of optimizers that went along from a checkpoint and that the config sets otherwise, one for each group of
    parameters: the `optimizer`, the `group`, the `option`, its value in the `config`, and the one that `trained`."""
    argv: list[str] = field(default_factory=list)
    """How the last process was started."""
    host: str = ""
    """On which host rank 0 ran last."""
    pid: int = 0
    """Its process there."""
    world_size: int = 1
    """Number of ranks."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of torch and dream_trainer."""
    code: dict[str, str] = field(default_factory=dict)
    """Digests of the user's own modules, as the last process found them, by their files' paths from where it ran."""


def write_record(run_dir: Path, record: RunRecord) -> None:
    """Writes the record, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # One entry a line: `indent` would have all of it written by Python's own encoder, several times as slow.
    entries = [f'  "{name}": {json.dumps(json_ready(value))}' for name, value in vars(record).items()]
    replace_file(run_dir / RECORD_NAME, "{\n" + ",\n".join(entries) + "\n}\n")


def read_record(run_dir: Path) -> RunRecord | None:
    """The record of a run; None if there is none, or none that can be read."""
    try:
        found = json.loads((run_dir / RECORD_NAME).read_text())
        known = {part.name for part in fields(RunRecord)}
        record = RunRecord(**{name: value for name, value in found.items() if name in known})
        record.metrics = {name: float(value) for name, value in record.metrics.items()}
        record.best = {
            name: {"value": float(best["value"]), "step": int(best["step"]), "mode": str(best["mode"])}
            for name, best in record.best.items()
        }
        record.kept_options = [
            {name: kept[name] for name in ("optimizer", "group", "option", "config", "trained")}
            for kept in record.kept_options
        ]
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    return record


def is_alive(run_dir: Path, record: RunRecord) -> bool | None:
    """Whether a job still trains the run; None if that cannot be known from this host."""
    claimed = is_claimed(run_dir)
    if claimed is not None:  # a trainer that writes no checkpoints claims no directory
        return claimed
    return _is_process(record.pid) if record.host == socket.gethostname() else None


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
