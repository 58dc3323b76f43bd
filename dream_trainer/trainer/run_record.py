"""`run.json`: what a run says about itself: how far it is, how it goes, why it ended.

RunRecorder writes it; `dream-trainer runs` reads it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dream_trainer.checkpoint.files import step_directories
from dream_trainer.checkpoint.lookup import find_checkpoint, is_checkpoint
from dream_trainer.checkpoint.manifest import MANIFEST_NAME, read_manifest
from dream_trainer.checkpoint.run_directory import is_claimed
from dream_trainer.config.config_files import read_plain
from dream_trainer.config.serialize import leaves
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.loggers.interface import Stamp
from dream_trainer.loggers.line_files import json_ready, replace_file

RECORD_NAME = "run.json"
CONFIG_NAME = "config.json"
LOG_NAME = "metrics.jsonl"
_DEPTH = 3  # levels below the directory of runs: project, group, experiment
_LAST_BYTES = 1 << 14

BRANCH = "checkpoint_parameters.branch."
_SPELLINGS = {"lr": ("lr", "learning_rate")}

RunState = Literal["running", "stopped", "finished", "failed"]


@dataclass(kw_only=True)
class RunRecord:
    """A run at the last moment at which it wrote this down: its start, a validation, a checkpoint, its end."""

    state: RunState = "running"
    """"stopped": asked to, by code, a signal or `max_time`, before its limits; "finished": it reached them."""
    why: str | None = None  # why it was stopped, or the line of the exception that it failed with
    failed_rank: int | None = None  # of a failed run: the rank whose failure came first; None where nobody knows it
    error: str | None = None
    """Of a failed run: the exception with all that it says, its place, and the calls that led there."""
    started: float = 0.0  # when it was first started, in seconds since 1970
    seen: float = 0.0  # when this was written
    starts: int = 0  # how often training was started or went on in a new process
    step: int = 0  # optimizer steps completed
    epoch: int = 0
    samples: int = 0  # samples consumed by all ranks
    seconds: float = 0.0  # of training, all processes together
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each metric whose best is kept: its `value`, the `step` of that, and the `mode`, "min" or "max"."""
    parent: dict[str, Any] | None = None
    """Of a branch: the `checkpoint` that it began from, its `step`, and what went along."""
    resumed_from: str | None = None
    """The checkpoint that the last process went on from: the run's, another run's, or one in a `local_directory`."""
    kept_options: list[dict[str, Any]] = field(default_factory=list)
    """Options that a checkpoint set against the config, as dicts of `KeptOption`."""
    argv: list[str] = field(default_factory=list)  # how the last process was started
    host: str = ""  # on which host rank 0 ran last
    pid: int = 0  # its process there
    world_size: int = 1  # number of ranks
    versions: dict[str, str] = field(default_factory=dict)  # of torch and dream_trainer
    code: dict[str, str] = field(default_factory=dict)
    """Digests of the user's own modules, as the last process found them, by their files' paths from where it ran."""


def write_record(run_dir: Path, record: RunRecord) -> None:
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


def read_config(path: Path) -> dict[str, Any]:
    """The config of a run, a checkpoint or a file."""
    if is_checkpoint(path):
        return read_manifest(path).config
    file = path / CONFIG_NAME if path.is_dir() else path
    if not file.exists():
        try:  # older versions wrote no file without a logger; their checkpoints have the config
            return read_manifest(find_checkpoint(path)).config
        except CheckpointError:
            raise ConfigError(
                f"{file} does not exist. Give a run's directory, such as runs/project/group/experiment."
            ) from None
    config = read_plain(file)
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no config but a {type(config).__name__}. Give a run's directory.")
    return config


def trained_fields(config: Mapping[str, Any], record: RunRecord | None) -> dict[str, Any]:
    """The config's fields by dotted names; an option from a checkpoint is shown beside it: `0.003 (trained 0.01)`."""
    values = dict(leaves(config))
    if record is None:
        return values
    words: dict[str, Any] = (record.parent or {}).get("words", {})
    fields_of_start = {BRANCH + name: word for name, word in words.items() if BRANCH + name in values}
    trained: dict[str, tuple[Any, list[str]]] = {}
    for kept in record.kept_options:
        option, asked = kept["option"], kept["config"]
        names = [name for name, value in values.items() if _sets(name, option) and value == asked]
        for name in names or [f"{kept['optimizer']}.{option}"]:
            trained.setdefault(name, (asked, []))[1].append(str(kept["trained"]))
    shown = {name: f"{asked} (trained {', '.join(dict.fromkeys(found))})" for name, (asked, found) in trained.items()}
    return values | fields_of_start | shown


def _sets(field: str, option: str) -> bool:
    end = field.rpartition(".")[2]
    return any(end == name or end.endswith(f"_{name}") for name in _SPELLINGS.get(option, (option,)))


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


@dataclass(kw_only=True)
class ListedRun:
    """A run as `dream-trainer runs` shows it."""

    name: str  # its path below the listed directory
    path: Path
    state: str
    """The record's; "dead": it says "running", and nothing runs; "unknown": it ran on another host; "-": no record."""
    record: RunRecord
    config: dict[str, Any]
    last: dict[str, dict[str, Any]]  # the newest value of each metric, with its step
    best: dict[str, Any] | None = None
    """The metric shown: its name, value, step and mode, and whether it is the last value."""

    def set_best(self, metric: str | None, mode: str | None) -> None:
        """Shows a metric: its best value, or its last if none was kept. None shows the first whose best was kept."""
        name = metric or next(iter(self.record.best), None)
        if name in self.record.best:
            self.best = {"name": name, **self.record.best[name], "is_last": False}
        elif name in self.last:
            self.best = {"name": name, **self.last[name], "mode": mode, "is_last": True}


def run_directories(root: Path) -> list[Path]:
    """The directories at or below `root` that a run has written to; runs inside of a run are not searched."""
    found = []
    for place, directories, files in os.walk(root, followlinks=True):
        path = Path(place)
        directories.sort()
        saves = step_directories(path / "checkpoints")  # a group may have that name too
        is_run = any((save / MANIFEST_NAME).exists() for _, save in saves)
        if is_run or {RECORD_NAME, CONFIG_NAME, LOG_NAME}.intersection(files):
            found.append(path)
            directories.clear()
        elif len(path.relative_to(root).parts) >= _DEPTH:
            directories.clear()
    return found


def read_run(path: Path, root: Path) -> ListedRun:
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
    last |= _follow_log(record, path / LOG_NAME)
    name = path.name if path == root else path.relative_to(root).as_posix()
    return ListedRun(name=name, path=path, state=state, record=record, config=config, last=last)


def _follow_log(record: RunRecord, file: Path) -> dict[str, dict[str, Any]]:
    """The last logged values; they may be of later steps than the record, which is brought up to date."""
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
        except (ValueError, KeyError, TypeError):  # the first may begin before the bytes read
            continue
        record.step, record.seen = max(record.step, step), max(record.seen, seen)
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        found |= {n: {"value": float(value), "step": step} for n, value in numbers.items() if n not in Stamp._fields}
    return found
