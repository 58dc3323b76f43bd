"""The curves of a run: what its metrics.jsonl holds, sorted into panels by name."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from dream_trainer.cli.found_runs import LOG_NAME, run_directories
from dream_trainer.errors import ConfigError, DataError
from dream_trainer.loggers.interface import Stamp
from dream_trainer.loggers.jsonl import read_jsonl

Record = Mapping[str, float]

# What is drawn unless it is chosen: titles of panels, and the names that belong there. The first that fits counts.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("loss", re.compile(r"(.*/)?(\w+_)?loss")),
    ("learning rate", re.compile(r"(.*/)?(\w+_)?(lr|learning_rate)(/.*)?")),
    ("gradient norm", re.compile(r"(.*/)?(\w+_)?grad(ient)?_norm|gradients/[^./]+/norm")),
    ("tokens per second", re.compile(r"(.*/)?tokens_per_second")),
    ("samples per second", re.compile(r"(.*/)?samples_per_second")),
)


@dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    run: str
    metric: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    @property
    def is_validation(self) -> bool:
        """Whether a validation found it."""
        return self.metric.startswith("val/")


def runs_of(path: Path) -> list[Path]:
    """The runs that a path means: itself, or of a directory of several those below it that have logged something."""
    if not path.is_dir() or (path / LOG_NAME).exists():
        return [path]
    return [run for run in run_directories(path) if (run / LOG_NAME).exists()] or [path]


def read_run(path: Path) -> list[Record]:
    """The lines of a run's metrics.jsonl. Lines that are damaged are left out, which is said on stderr.

    Args:
        path: The run's directory, or the file.

    Raises:
        ConfigError: There is no such file.
        DataError: There is no line to use in it.
    """
    file = path / LOG_NAME if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{file} is not there. Give a run's directory, such as runs/project/group/experiment, of a run that logs "
            'to "jsonl".'
        )
    try:
        whole: list[Record] = [record for record in read_jsonl(file) if _is_whole(record)]
        with file.open("rb") as raw:
            n_lines = sum(line.endswith(b"\n") for line in raw)
    except (KeyError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is damaged: {error}. Give the metrics.jsonl that a run wrote.") from error
    if not whole:
        raise DataError(f"{file} holds no metrics{' that can be read' if n_lines else ' yet'}. Nothing can be drawn.")
    if len(whole) < n_lines:
        print(f"warning: {n_lines - len(whole)} damaged lines of {file} are left out", file=sys.stderr)
    return whole


def _is_whole(record: Mapping[str, object]) -> bool:
    return all(isinstance(record.get(name), int | float) for name in Stamp._fields)


def names_of(paths: Sequence[Path]) -> list[str]:
    """What to call the runs: the last parts of their directories, as many as tell them apart.

    Raises:
        ConfigError: One is named twice.
    """
    full = [(path if path.is_dir() else path.parent).resolve() for path in paths]
    if len(set(full)) < len(full):
        # Several files of one directory: metrics.jsonl and what a restart set aside.
        full = [path.resolve() for path in paths]
    if len(set(full)) < len(full):
        raise ConfigError("one run is given twice. Name each once.")
    count, names = 1, [path.name for path in full]
    while len(set(names)) < len(names):  # ends, as the whole paths differ
        count += 1
        names = ["/".join(path.parts[-count:]) for path in full]
    return names


def panels(runs: Mapping[str, Sequence[Record]], chosen: Sequence[str], x: str) -> dict[str, list[Curve]]:
    """The curves to draw, by the title of their panel.

    Args:
        runs: Lines of each run by its name.
        chosen: Names or patterns of metrics; none for the usual ones: losses, the rest of the validation and what
            training has of it, learning rate, gradient norm, throughput. Of a run that did not log it, throughput is
            told from its lines' samples and times.
        x: "steps", "samples" or "time" (seconds).

    Raises:
        ConfigError: Of what is chosen, no run has any.
    """
    logged = list(dict.fromkeys(name for records in runs.values() for record in records for name in record))
    metrics = [name for name in logged if name not in Stamp._fields]
    for pattern in chosen:
        if not any(fnmatchcase(name, pattern) for name in metrics):
            raise ConfigError(f"--metrics {pattern}: no such metric. There are {', '.join(sorted(metrics))}.")
    curves_of_panel: dict[str, list[Curve]] = {}
    order = [title for title, _ in _KINDS]
    titled = [(_title(name), name) for name in _wanted(metrics, chosen)]
    # What has no place of its own, the rest of the validation, comes after the losses.
    for title, name in sorted(titled, key=lambda item: order.index(item[0]) if item[0] in order else 0.5):
        curves_of_panel.setdefault(title, []).extend(_curves(runs, name, x))
    if not chosen:
        runs_with_rate = {
            curve.run for title, curves in curves_of_panel.items() if title.endswith("per second") for curve in curves
        }
        rates = [_rate(run, records, x) for run, records in runs.items() if run not in runs_with_rate]
        curves_of_panel.setdefault("samples per second", []).extend(curve for curve in rates if curve.x)
    curves_of_panel = {title: curves for title, curves in curves_of_panel.items() if curves}
    if not curves_of_panel:
        raise ConfigError(f"none of the usual metrics was logged. Choose with --metrics: {', '.join(sorted(metrics))}.")
    return curves_of_panel


def _wanted(metrics: Sequence[str], chosen: Sequence[str]) -> Iterator[str]:
    validated = {_title(name) for name in metrics if name.startswith("val/")}
    for name in metrics:
        is_usual = name.startswith("val/") or any(pattern.fullmatch(name) for _, pattern in _KINDS)
        is_counterpart = name.startswith("train/") and _title(name) in validated
        if any(fnmatchcase(name, pattern) for pattern in chosen) if chosen else is_usual or is_counterpart:
            yield name


def _title(name: str) -> str:
    """Metrics of one kind share a panel; other ones do with those of the same last part, as of several loaders."""
    for title, pattern in _KINDS:
        if pattern.fullmatch(name):
            return title
    return name.rpartition("/")[2]


def _curves(runs: Mapping[str, Sequence[Record]], name: str, x: str) -> Iterator[Curve]:
    for run, records in runs.items():
        points: dict[float, float] = {}
        for record in records:
            if name in record:
                value = record[name]
                points[_place(record, records[0], x)] = value if math.isfinite(value) else math.nan
        if points:
            order = sorted(points)
            yield Curve(run, name, tuple(order), tuple(points[place] for place in order))


def _place(record: Record, first: Record, x: str) -> float:
    if x == "time":
        return record["time"] - first["time"]
    return record["step" if x == "steps" else "samples"]


def _rate(run: str, records: Sequence[Record], x: str) -> Curve:
    """Samples per second between the lines that training wrote, validations and checkpoints in between included."""
    lines = [r for r in records if not any(name.startswith("val/") for name in r)]
    places, rates = [], []
    for before, after in pairwise(lines):
        seconds = after["time"] - before["time"]
        if seconds > 0 and after["samples"] > before["samples"]:
            places.append(_place(after, records[0], x))
            rates.append((after["samples"] - before["samples"]) / seconds)
    return Curve(run, "samples_per_second", tuple(places), tuple(rates))


def shown_values(curve: Curve, smooth: float) -> list[float]:
    """The values to draw: what training logged smoothed, validations as they are."""
    return smoothed(curve.y, smooth) if smooth and not curve.is_validation else list(curve.y)


def label(curve: Curve, runs: Sequence[str], metrics: Sequence[str]) -> str:
    """What to call a curve beside those of its panel: by what they differ in."""
    if len(runs) == 1:
        return curve.metric
    return curve.run if len(metrics) == 1 else f"{curve.run}: {curve.metric}"


def time_scale(found: Mapping[str, Sequence[Curve]]) -> tuple[float, str]:
    """Seconds in the unit of the time axis, and its name."""
    longest = max((curve.x[-1] for curves in found.values() for curve in curves), default=0.0)
    if longest < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")


def smoothed(values: Sequence[float], share: float) -> list[float]:
    """The running mean that keeps `share` of itself at each value, without the pull to zero at its start."""
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        if not math.isnan(value):
            mean, weight = share * mean + (1 - share) * value, share * weight + (1 - share)
        result.append(mean / weight if weight else math.nan)
    return result
