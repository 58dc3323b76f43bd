"""`dream-trainer plot`: the curves of runs in one picture, a panel for each kind of metric."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from tyro.conf import Positional, arg

from dream_trainer.checks import refuse
from dream_trainer.cli.output import Flag
from dream_trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AXES = {"steps": ("step", "optimizer steps"), "samples": ("samples", "samples"), "time": ("time", "minutes")}
_LINES = ("-", "--", ":", "-.")
_KINDS = {
    "loss": re.compile(r"(.*/)?(\w+_)?loss"),
    "learning rate": re.compile(r"(.*/)?(\w+_)?(lr|learning_rate)(/.*)?"),
    "gradient norm": re.compile(r"(.*/)?(\w+_)?grad(ient)?_norm|gradients/[^./]+/norm"),
    "tokens per second": re.compile(r"(.*/)?tokens_per_second"),
    "samples per second": re.compile(r"(.*/)?samples_per_second"),
}
"""Titles of panels and names of their metrics. The first that fits counts."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw the curves of one or several runs: losses, validation, learning rate, gradient norm and throughput."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="")]
    """Directories of runs, or of groups with all their runs; or metrics.jsonl files; at least one."""
    output: Annotated[Path, arg(metavar="FILE")] = Path("plot.png")
    """The picture: .png, .svg or .pdf."""
    metrics: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]", help_behavior_hint="")] = ()
    """Draw only these. Names as they were logged; * matches anything, as in 'val/*'."""
    x: Literal["steps", "samples", "time"] = "steps"
    """Optimizer steps, samples, or minutes since a run's first line."""
    log_y: Flag = False
    """Logarithmic values in panels where all are above zero."""

    def run(self) -> None:
        refuse(not self.runs, "no run was given. Give a run's directory, such as runs/project/group/experiment.")
        if self.output.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"--output {self.output} has no known format. End it in .png, .svg or .pdf.")
        found = panels(runs_of(self.runs), self.metrics, self.x)
        try:
            figure = draw(found, x=self.x, log_y=self.log_y)
        except ImportError as error:
            raise ConfigError(f"plot needs matplotlib: {error}. Run pip install matplotlib.") from error
        self.output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.output, dpi=150)
        print(f"drew {', '.join(found)}: {self.output}")


class Curve(NamedTuple):
    """One metric of one run: values by their places on the axis."""

    run: str
    metric: str
    points: dict[float, float]


def runs_of(paths: Sequence[Path]) -> dict[str, list[dict[str, float]]]:
    """The records of the runs at and below some paths, by their places in the directory that holds all."""
    from dream_trainer.trainer.run_record import LOG_NAME, run_directories

    files: list[Path] = []
    for path in paths:
        below = run_directories(path) if path.is_dir() and not (path / LOG_NAME).exists() else []
        logs = [run / LOG_NAME for run in below if (run / LOG_NAME).exists()]
        files += logs or [path / LOG_NAME if path.is_dir() else path]
    full = [file.resolve().parent if file.name == LOG_NAME else file.resolve() for file in files]
    root = os.path.commonpath([path.parent for path in full])
    return {str(path.relative_to(root)): read_log(file) for path, file in zip(full, files, strict=True)}


def read_log(file: Path) -> list[dict[str, float]]:
    """The whole lines of a metrics.jsonl, with `time` in minutes since the first."""
    from dream_trainer.loggers.buffer import Stamp
    from dream_trainer.loggers.line_files import read_jsonl

    refuse(not file.is_file(), f'{file} does not exist. Give the directory of a run that logs to "jsonl".')
    try:
        records = [r for r in read_jsonl(file) if all(isinstance(r.get(key), int | float) for key in Stamp._fields)]
    except (KeyError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is damaged: {error}. Give the metrics.jsonl that a run wrote.") from error
    refuse(not records, f"{file} holds no metrics that can be read. Give a run that has logged some.", DataError)
    return [record | {"time": (record["time"] - records[0]["time"]) / 60} for record in records]


def panels(runs: Mapping[str, Sequence[Mapping[str, float]]], chosen: Sequence[str], x: str) -> dict[str, list[Curve]]:
    """Curves by the titles of their panels. Default: losses, validations, learning rates, norms and throughput."""
    from dream_trainer.loggers.buffer import Stamp

    logged = dict.fromkeys(name for records in runs.values() for record in records for name in record)
    metrics = [name for name in logged if name not in Stamp._fields]
    for pattern in chosen:
        if not any(fnmatchcase(name, pattern) for name in metrics):
            raise ConfigError(f"--metrics {pattern}: no such metric. There are {', '.join(sorted(metrics))}.")
    validated = {_title(name): None for name in metrics if name.startswith("val/")}
    found: dict[str, list[Curve]] = {title: [] for title in ("loss", *validated, *_KINDS)}
    for name in metrics:
        is_usual = _title(name) in _KINDS or (name.startswith(("val/", "train/")) and _title(name) in validated)
        if any(fnmatchcase(name, pattern) for pattern in chosen) if chosen else is_usual:
            for run, records in runs.items():
                points = {record[_AXES[x][0]]: record[name] for record in records if name in record}
                found.setdefault(_title(name), []).extend([Curve(run, name, points)] if points else [])
    found = {title: curves for title, curves in found.items() if curves}
    if not found:
        raise ConfigError(f"none of the usual metrics was logged. Choose with --metrics: {', '.join(sorted(metrics))}.")
    return found


def _title(name: str) -> str:
    return next((title for title, pattern in _KINDS.items() if pattern.fullmatch(name)), name.rpartition("/")[2])


def draw(found: Mapping[str, Sequence[Curve]], *, x: str, log_y: bool = False) -> Figure:
    """The figure. Runs differ in colour and metrics of a panel in their lines; dots are validations."""
    from matplotlib.figure import Figure

    n_columns = 1 if len(found) == 1 else 2
    n_rows = -(-len(found) // n_columns)
    figure = Figure(figsize=(5.2 * n_columns + 0.4, 2.9 * n_rows + 0.5), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    runs = list(dict.fromkeys(curve.run for curves in found.values() for curve in curves))
    figure.suptitle(" and ".join(runs) if len(runs) < 3 else f"{len(runs)} runs")
    for axes, (title, curves) in zip(grid, found.items(), strict=False):
        metrics = list(dict.fromkeys(curve.metric for curve in curves))
        for curve in curves:
            run, metric = runs.index(curve.run), metrics.index(curve.metric)
            style = {"color": f"C{metric % 10}", "label": curve.metric}
            if len(runs) > 1:
                style = {"color": f"C{run % 10}", "linestyle": _LINES[metric % len(_LINES)]}
                style["label"] = curve.run if len(metrics) == 1 else f"{curve.run}: {curve.metric}"
            has_dots = curve.metric.startswith("val/") or len(curve.points) == 1
            axes.plot([*curve.points], [*curve.points.values()], marker="." if has_dots else "", **style)
        if len(curves) > 1:
            axes.legend(fontsize=8)
        axes.set(title=title, xlabel=_AXES[x][1])
        axes.grid(alpha=0.3)
        if log_y and not any(value <= 0 for curve in curves for value in curve.points.values()):
            axes.set_yscale("log")
    for axes in grid[len(found) :]:
        axes.set_axis_off()
    return figure
