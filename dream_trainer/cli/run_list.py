"""`dream-trainer runs`: the runs under a directory, how each of them goes, and what differs between them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dream_trainer.callbacks.tables import print_table
from dream_trainer.cli.output import age_cell, number_cell, print_json, seconds_cell
from dream_trainer.cli.run_config import read_config, value_cell
from dream_trainer.config.serialize import leaves
from dream_trainer.config.trainer_config import runs_directory
from dream_trainer.errors import ConfigError
from dream_trainer.trainer.run_record import CONFIG_NAME, RECORD_NAME, RunRecord, is_alive, read_record

DEPTH = 3
"""Levels below the directory of runs: project, group, experiment."""
SHOWN_FIELDS = 5
_LAST_BYTES = 1 << 16
# They are in the run's name, or say nothing of what is trained.
_NOT_COMPARED = ("project", "group", "experiment", "runs_dir", "checkpoint_parameters.resume")


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
    best: dict[str, Any] | None = None
    """The metric shown: its name, value, step and mode."""


def list_runs(directory: Path | None, *, group: str | None, metric: str | None, sort: str, as_json: bool) -> int:
    """Prints the runs under `directory`; returns the exit code.

    Raises:
        ConfigError: There is no such directory.
    """
    root = runs_directory() if directory is None else directory
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory. Give that of your runs, or set DREAM_TRAINER_RUNS.")
    runs = [_read(path, root) for path in _run_directories(root)]
    runs = [run for run in runs if group is None or run.config.get("group", run.path.parent.name) == group]
    for run in runs:
        run.best = _best(run.record, metric)
    runs.sort(key=lambda run: _order(run, sort))
    if as_json:
        print_json([{**vars(run), "record": asdict(run.record)} for run in runs])
        return 0
    if not runs:
        print(f"{root} has no runs" + (f" of group {group}." if group else " yet."))
        return 0
    differing = _differing([run.config for run in runs])
    header = ["run", "state", "step", "best", "took", "seen"]
    rows = [[*_row(run), cell] for run, cell in zip(runs, differing, strict=True)]
    if any(differing):
        print_table(str(root), [*header, "differs"], rows)
    else:
        print_table(str(root), header, [row[:-1] for row in rows])
    for run in runs:
        if run.record.why and run.state != "running":
            print(f"{run.name}: {run.state} at step {run.record.step}: {run.record.why}")
    return 0


def _run_directories(root: Path) -> list[Path]:
    """The directories at or below `root` that a run has written to; none is looked for inside of a run."""
    found = []
    for place, directories, files in os.walk(root, followlinks=True):
        path = Path(place)
        directories.sort()
        if RECORD_NAME in files or CONFIG_NAME in files or "checkpoints" in directories:
            found.append(path)
            directories.clear()
        elif len(path.relative_to(root).parts) >= DEPTH:
            directories.clear()
    return found


def _read(path: Path, root: Path) -> ListedRun:
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
    _follow_the_log(record, path / "metrics.jsonl")
    name = path.relative_to(root).as_posix()
    return ListedRun(name=path.name if name == "." else name, path=path, state=state, record=record, config=config)


def _follow_the_log(record: RunRecord, file: Path) -> None:
    """The last line that was logged may be of a later step than the last validation or save."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = log.read().split(b"\n")[:-1]  # the last may still be written
        line = json.loads(lines[-1])
        record.step, record.seen = max(record.step, int(line["step"])), max(record.seen, float(line["time"]))
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return


def _best(record: RunRecord, metric: str | None) -> dict[str, Any] | None:
    name = metric or next(iter(record.best), None)
    if name in record.best:
        return {"name": name, **record.best[name]}
    return None


def _order(run: ListedRun, sort: str) -> tuple[Any, ...]:
    record = run.record
    if sort == "best":
        value = run.best["value"] if run.best else math.nan
        if math.isnan(value):
            return True, 0.0, run.name
        return False, -value if run.best and run.best["mode"] == "max" else value, run.name
    keys = {
        "name": run.name,
        "state": run.state,
        "step": record.step,
        "took": record.seconds,
        "seen": record.seen,
        "started": record.started,
    }
    return keys[sort], run.name


def _row(run: ListedRun) -> list[str]:
    record, best = run.record, run.best
    return [
        run.name,
        run.state,
        str(record.step),
        f"{best['name']} {number_cell(best['value'])} at {best['step']}" if best else "-",
        seconds_cell(record.seconds) if record.seconds else "-",
        age_cell(record.seen) + " ago" if record.seen else "-",
    ]


def _differing(configs: list[dict[str, Any]]) -> list[str]:
    """For each config its values of the fields in which not all of them are alike."""
    flat = [{name: value_cell(value) for name, value in leaves(config)} for config in configs]
    known = [fields for fields in flat if fields]
    names = [
        name
        for name in dict.fromkeys(name for fields in known for name in fields)
        if name not in _NOT_COMPARED and len({fields.get(name) for fields in known}) > 1
    ]
    short = _shortened(names)
    cells = []
    for fields in flat:
        values = [f"{short[name]} {fields[name]}" for name in names if name in fields]
        more = [f"and {len(values) - SHOWN_FIELDS} more"] if len(values) > SHOWN_FIELDS else []
        cells.append(", ".join(values[:SHOWN_FIELDS] + more))
    return cells


def _shortened(names: list[str]) -> dict[str, str]:
    """Each dotted name by its last part, or whole where several end alike."""
    ends = [name.rpartition(".")[2] for name in names]
    return {name: end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)}
