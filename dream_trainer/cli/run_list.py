"""`dream-trainer runs`: the runs under a directory, how each of them goes, and what differs between them."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dream_trainer.best_value import mode_by_name
from dream_trainer.callbacks.tables import print_table
from dream_trainer.cli.found_runs import ListedRun, read_listed, run_directories
from dream_trainer.cli.output import age_cell, number_cell, print_json, seconds_cell
from dream_trainer.cli.run_columns import asked_for, differing
from dream_trainer.config.trainer_config import runs_directory
from dream_trainer.errors import ConfigError

_PIPED_WIDTH = 160


def list_runs(
    directory: Path | None,
    *,
    group: str | None,
    metric: str | None,
    sort: str,
    columns: Sequence[str],
    whole_errors: bool,
    as_json: bool,
) -> int:
    """Prints the runs under `directory`; returns the exit code.

    Raises:
        ConfigError: There is no such directory, or no run has the metric or a column.
    """
    root = runs_directory() if directory is None else directory
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory. Give that of your runs, or set DREAM_TRAINER_RUNS.")
    runs = [read_listed(path, root) for path in run_directories(root)]
    runs = [run for run in runs if group is None or run.config.get("group", run.path.parent.name) == group]
    if metric is not None:
        _refuse_unknown(metric, runs)
    mode = _mode(metric, runs) if metric is not None and sort == "best" else None
    for run in runs:
        run.best = _shown(run, metric, mode)
    runs.sort(key=lambda run: _order(run, sort))
    if as_json:
        print_json([{**vars(run), "record": asdict(run.record)} for run in runs])
        return 0
    if not runs:
        print(f"{root} has no runs" + (f" of group {group}." if group else " yet."))
        return 0
    header, cells = list(columns), asked_for(runs, columns)
    if not columns and any(differs := differing(runs)):
        header, cells = ["differs"], [[cell] for cell in differs]
    if any(run.record.parent for run in runs):
        header, cells = ["began from", *header], [[_origin(run), *more] for run, more in zip(runs, cells, strict=True)]
    rows = [[*_row(run), *more] for run, more in zip(runs, cells, strict=True)]
    print_table(str(root), ["run", "state", "step", "best", "took", "seen", *header], rows)
    _print_ends(runs, whole_errors=whole_errors)
    return 0


def _refuse_unknown(metric: str, runs: list[ListedRun]) -> None:
    names = sorted({name for run in runs for name in (*run.record.best, *run.last)})
    if not names or metric in names:
        return
    near = get_close_matches(metric, names, n=1)
    advice = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(f"--metric {metric}: no run has it. {advice}There are {', '.join(names)}.")


def _mode(metric: str, runs: list[ListedRun]) -> str:
    kept = [run.record.best[metric]["mode"] for run in runs if metric in run.record.best]
    mode = kept[0] if kept else mode_by_name(metric)
    if mode is None:
        raise ConfigError(
            f"--sort best: no run kept its best {metric}, and the name does not say whether lower or higher values are "
            "better. Use another order."
        )
    return str(mode)


def _shown(run: ListedRun, metric: str | None, mode: str | None) -> dict[str, Any] | None:
    """The best value of the metric; of one whose best was not kept, the last."""
    name = metric or next(iter(run.record.best), None)
    if name in run.record.best:
        return {"name": name, **run.record.best[name], "is_last": False}
    if name in run.last:
        return {"name": name, **run.last[name], "mode": mode, "is_last": True}
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
    at = "-"
    if best:
        at = f"{best['name']} {number_cell(best['value'])} {'last, ' if best['is_last'] else ''}at {best['step']}"
    return [
        run.name,
        run.state,
        str(record.step),
        at,
        seconds_cell(record.seconds) if record.seconds else "-",
        age_cell(record.seen) + " ago" if record.seen else "-",
    ]


def _origin(run: ListedRun) -> str:
    """What a branch began from, named as the list would name it."""
    parent = run.record.parent
    if parent is None:
        return "-"
    begun = str(parent.get("run") or Path(parent["checkpoint"]).parent.parent.name).split("/")
    own = [str(run.config.get(part)) for part in ("project", "group", "experiment")]
    above = max(0, len(own) - len(run.name.split("/")))  # parts that stand in the title of the list
    return f"{'/'.join(begun[above:] if begun[:above] == own[:above] else begun)} at {parent['step']}"


def _print_ends(runs: list[ListedRun], *, whole_errors: bool) -> None:
    """Why runs ended, each in a line that fits the terminal, or whole."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH
    is_cut = False
    for run in runs:
        if not run.record.why or run.state == "running":
            continue
        line = f"{run.name}: {run.state} at step {run.record.step}: {run.record.why}"
        if whole_errors:
            print(line)
            print(textwrap.indent(run.record.error or "", "  "), end="")
        else:
            is_cut |= len(line) > width
            print(line if len(line) <= width else f"{line[: width - 3]}...")
    if is_cut:
        print("--long shows errors whole")
