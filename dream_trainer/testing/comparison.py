"""Two runs side by side: the first step that differs, and the first difference in it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dream_trainer.testing.launcher import Run
from dream_trainer.testing.run_probe import Summary

FACTOR = 30.0
"""How much farther than a run with weights moved by rounding another one may go."""
LEAST = 64 * 2.0**-23
"""Rounding of float32, in the shortest sums."""
STAGES = ("samples", "results", "gradients", "rates", "trained", "weights", "optimizer", "buffers")


class Difference(NamedTuple):
    """Where two runs begin to differ."""

    step: int
    stage: str
    name: str
    one: str
    other: str

    def told(self, one: str, other: str) -> str:
        values = f": {self.one} {one}, {self.other} {other}" if self.one else ""
        return f"{self.name}{values}"


def steps_of(runs: Sequence[Run], rank: int = 0) -> dict[int, dict[str, Any]]:
    """All steps of a run that was stopped and resumed; of repeated steps the last one counts."""
    return {step: found for run in runs for step, found in run.records[rank]["steps"].items()}


def first_difference(one: Sequence[Run], other: Sequence[Run], rank: int = 0) -> Difference | None:
    """The first bit that differs, in the order of a step's computation."""
    a, b = one[0].records[rank], other[0].records[rank]
    built = _unlike(0, "initial weights", a["built"], b["built"])
    if [*a["built"]] != [*b["built"]]:
        return Difference(0, "order", "parameters", ", ".join(a["built"]), ", ".join(b["built"]))
    if built is not None:
        return built
    ours, theirs = steps_of(one, rank), steps_of(other, rank)
    for step in sorted(ours.keys() & theirs.keys()):
        for stage in STAGES:
            difference = _unlike(step, stage, _named(ours[step][stage]), _named(theirs[step][stage]))
            # Of results, which may be times, those count that come with other gradients.
            if difference is not None and (stage != "results" or _computes_otherwise(ours[step], theirs[step])):
                return difference
    if ours.keys() != theirs.keys():
        return Difference(min(ours.keys() ^ theirs.keys()), "steps", "steps trained", str(max(ours)), str(max(theirs)))
    return None


def _computes_otherwise(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return any(_unlike(0, stage, one[stage], other[stage]) for stage in ("gradients", "weights", "buffers"))


def _named(values: Any) -> Mapping[str, Any]:
    if isinstance(values, Mapping):
        return values
    return {f"micro-batch {number}": value for number, value in enumerate(values)} if values else {}


def _unlike(step: int, stage: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference | None:
    if stage == "trained":
        ours, theirs = {*one.values()}, {*other.values()}
        for name in sorted(ours ^ theirs):
            return Difference(step, stage, name, _is_trained(name in ours), _is_trained(name in theirs))
        return None
    for name in [*one, *(name for name in other if name not in one)]:
        a, b = one.get(name), other.get(name)
        if repr(_bits(a)) != repr(_bits(b)):
            shown = stage in ("results", "rates")
            return Difference(step, stage, name, str(a) if shown else "", str(b) if shown else "")
    return None


def _is_trained(yes: bool) -> str:
    return "is trained" if yes else "is frozen"


def _bits(value: Any) -> Any:
    return value.digest if isinstance(value, Summary) else value


class Rounding:
    """How far rounding takes a run, from one whose weights were moved by a little more than that."""

    def __init__(self, run: Run, moved: Run) -> None:
        self._reach: dict[tuple[int, str, str], float] = {}
        reached: dict[tuple[str, str], float] = {}
        for step, stage, name, _, _, distance in _distances([run], [moved]):
            reached[stage, name] = max(distance, reached.get((stage, name), 0.0))
            self._reach[step, stage, name] = reached[stage, name]

    def tolerance(self, step: int, stage: str, name: str) -> float:
        return LEAST + FACTOR * self._reach.get((step, stage, name), 0.0)


def beyond_rounding(one: Run, other: Run, rounding: Rounding, stable: Mapping[Any, Any]) -> Difference | None:
    """The first value of `other`, on any ranks, that differs from `one`'s by more than rounding."""
    for step, stage, name, a, b, distance in _distances([one], [other]):
        if stage == "logged" and (step, name) not in stable:
            continue
        if not distance <= rounding.tolerance(step, stage, name):
            return Difference(step, stage, name, a, b)
    ends = {run.records[0]["ends"] for run in (one, other)}
    if len(ends) > 1:
        return Difference(min(ends), "steps", "steps trained", *(str(run.records[0]["ends"]) for run in (one, other)))
    return None


def weights_apart(one: Run, other: Run, rounding: Rounding, step: int) -> bool:
    """Whether weights differ beyond rounding after a step."""
    return any(
        at == step and stage == "weights" and not distance <= rounding.tolerance(at, stage, name)
        for at, stage, name, _, _, distance in _distances([one], [other])
    )


def _distances(one: Sequence[Run], other: Sequence[Run]) -> Iterator[tuple[int, str, str, str, str, float]]:
    """Step, stage, name, both values and their distance; whole steps in the order of their computation."""
    ours, theirs = steps_of(one), _joined(other)
    logged = [_logged(runs) for runs in (one, other)]
    largest: dict[str, float] = {}
    for (_, name), value in logged[0].items():
        largest[name] = max(abs(value), largest.get(name, 0.0))
    for step in sorted(ours.keys() & theirs.keys()):
        a, b = ours[step], theirs[step]
        if step == min(ours):
            yield from _apart(0, "initial weights", one[0].records[0]["built"], other[0].records[0]["built"])
        yield from _samples(step, (a, b))
        for (at, name), value in logged[0].items():
            if at == step and (step, name) in logged[1]:
                reached = abs(value - logged[1][step, name]) / (largest[name] or 1.0)
                yield step, "logged", name, f"{value:.6g}", f"{logged[1][step, name]:.6g}", reached
        yield from _apart(step, "gradients", a["gradients"], b["gradients"])
        for name in a["rates"].keys() & b["rates"].keys():
            x, y = a["rates"][name], b["rates"][name]
            yield step, "rates", name, f"{x:.6g}", f"{y:.6g}", abs(x - y) / (abs(x) or 1.0)
        for name in sorted({*a["trained"]} ^ {*b["trained"]}):
            yield step, "trained", name, _is_trained(name in a["trained"]), _is_trained(name in b["trained"]), math.inf
        for stage in ("weights", "optimizer", "buffers"):
            yield from _apart(step, stage, a[stage], b[stage])


def _joined(runs: Sequence[Run]) -> dict[int, dict[str, Any]]:
    """Steps with the samples of all ranks, and with the parts of the model that other ranks hold."""
    steps = {step: dict(found) for step, found in steps_of(runs).items()}
    for run in runs:
        for record in run.records[1:]:
            for step, found in record["steps"].items():
                if step in steps:
                    for stage in ("gradients", "weights", "optimizer", "buffers"):
                        steps[step][stage] = found[stage] | steps[step][stage]
                    if run.job.mesh in ("replicas", "shards", "hybrid"):
                        steps[step]["samples"] = steps[step]["samples"] + found["samples"]
                        steps[step]["results"] = steps[step]["results"] + found["results"]
                    steps[step]["trained"] = [*{*steps[step]["trained"], *found["trained"]}]
    return steps


def _samples(step: int, both: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str, str, str, str, float]]:
    a, b = (Counter(sample for batch in found["samples"] for sample in batch) for found in both)
    if a != b:
        counts = f"{(a - b).total()} of {a.total()} samples", f"{(b - a).total()} of {b.total()} are others"
        yield step, "samples", "samples", *counts, math.inf


def _apart(
    step: int, stage: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[tuple[int, str, str, str, str, float]]:
    for name in one:
        if name in other:
            a, b = one[name], other[name]
            if a.digest == b.digest:
                yield step, stage, name, "", "", 0.0
            elif a.values.shape != b.values.shape:
                yield step, stage, name, "", "", math.inf
            else:
                size = float(np.linalg.norm(a.values)) or float(np.linalg.norm(b.values)) or 1.0
                yield step, stage, name, "", "", float(np.linalg.norm(a.values - b.values)) / size


def _logged(runs: Sequence[Run]) -> dict[tuple[int, str], float]:
    """Values of training, without those that are only logged at validations."""
    validated = {step for run in runs for step in run.records[0]["validated"]}
    of_steps = {name for run in runs for step, name in run.records[0]["logged"] if step not in validated}
    return {
        (step, name): values[-1]
        for run in runs
        for (step, name), values in run.records[0]["logged"].items()
        if math.isfinite(values[-1]) and name in of_steps
    }


def stable_values(one: Run, other: Run) -> dict[tuple[int, str], float]:
    """Logged values that two equal runs have alike, which times are not."""
    theirs = all_logged([other])
    return {key: value for key, value in all_logged([one]).items() if theirs.get(key) == value}


def all_logged(runs: Sequence[Run]) -> dict[tuple[int, str], float]:
    """All that was logged, as it was logged last."""
    return {key: values[-1] for run in runs for key, values in run.records[0]["logged"].items()}


def ranks_differ(run: Run) -> Difference | None:
    """The first thing that ranks should hold alike, and do not."""
    first, *others = (steps_of([run], rank) for rank in range(len(run.records)))
    for step in sorted(first):
        for stage in ("rates", "trained", "weights", "optimizer", "buffers"):
            for other in others:
                if step in other:
                    found = _unlike(step, stage, _named(first[step][stage]), _named(other[step][stage]))
                    if found is not None:
                        return found
    return None


def lost_attributes(undisturbed: Run, again: Run, resumed: Run, rank: int = 0) -> tuple[list[str], list[str]]:
    """Plain attributes that a resumed run ends with other values of than undisturbed ones, which change in training.

    The second list has dicts that the resumed run has a part of: those of caches, and of records by step.
    """
    record = undisturbed.records[rank]
    start, end, same, found = record["start"], record["end"], again.records[rank]["end"], resumed.records[rank]["end"]
    lost: list[str] = []
    parts: list[str] = []
    for path, value in end.items():
        if value != same.get(path) or value == found.get(path) or value == start.get(path):
            continue
        theirs = found.get(path)
        is_part = isinstance(value, dict) and isinstance(theirs, dict) and theirs.items() <= value.items()
        (parts if is_part else lost).append(path)
    return lost, parts


def other_files(alone: Run, again: Run, resumed: Run) -> list[str]:
    """Files of the user's in the run's directory that undisturbed runs have alike, and the resumed one has not."""
    ours, same, theirs = (_files(Path(run.job.runs_dir)) for run in (alone, again, resumed))
    return [name for name, content in ours.items() if same.get(name) == content != theirs.get(name)]


def _files(directory: Path) -> dict[str, str]:
    found = {}
    for file in sorted(directory.rglob("*")):
        inside = file.relative_to(directory)
        if file.is_file() and "checkpoints" not in inside.parts and file.suffix != ".jsonl":
            found[str(inside)] = file.read_bytes().hex()
        elif file.suffix == ".jsonl" and file.is_file():
            found[str(inside)] = _lines(file)
    return found


def _lines(file: Path) -> str:
    """A log's steps and names, without values, since some are times."""
    lines = []
    for line in file.read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            values = line
        lines.append(str((values.get("step"), sorted(values)) if isinstance(values, dict) else values))
    return "\n".join(sorted(lines))
