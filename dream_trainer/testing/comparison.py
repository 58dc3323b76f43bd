"""Two runs side by side: what differs in them, in the order of their computation."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dream_trainer.testing.launcher import Run
from dream_trainer.testing.run_probe import Summary

FACTOR = 30.0
"""How much farther than a run with weights moved by rounding another one may go."""
LEAST = 64 * 2.0**-23
"""Rounding of float32, in the shortest sums."""
HELD = ("rates", "trained", "weights", "optimizer", "buffers")
STAGES = ("order", "initial weights", "samples", "logged", "gradients", *HELD)
DATA = ("replicas", "shards", "hybrid")

Steps = dict[int, dict[str, Mapping[str, Any]]]
"""What a run had after each step: of each stage the values by name."""


class Difference(NamedTuple):
    """What is not the same bit for bit."""

    step: int
    stage: str
    name: str
    one: Any
    """None: it has no such value."""
    other: Any
    distance: float

    def told(self, one: str, other: str) -> str:
        if isinstance(self.one, Summary) or isinstance(self.other, Summary):
            return self.name
        if isinstance(self.one, tuple) and isinstance(self.other, tuple):
            others = (Counter(self.one) - Counter(self.other)).total()
            return f"{self.name}: {f'{others} of {len(self.one)} samples are others' if others else 'another order'}"
        a, b = (f"{each:.6g}" if isinstance(each, float) else str(each) for each in (self.one, self.other))
        return f"{self.name}: {a} {one}, {b} {other}"


def steps_of(runs: Sequence[Run], rank: int = 0) -> Steps:
    """Of a run that was stopped and resumed; of repeated steps the last one counts."""
    built, ends = runs[0].records[rank]["built"], {"steps trained": runs[-1].records[rank]["ends"]}
    steps: Steps = {0: {"order": {"parameters": ", ".join(built)}, "initial weights": built, "steps": ends}}
    for run in runs:
        steps |= {step: dict(found) for step, found in run.records[rank]["steps"].items()}
    logged: dict[int, dict[str, float]] = defaultdict(dict)
    for run in runs:
        for (step, name), value in run.records[rank]["logged"].items():
            logged[step].setdefault(name, value)
    for step, values in logged.items():
        steps.setdefault(step, {})["logged"] = values
    return steps


def joined(run: Run) -> Steps:
    """Steps with the samples of all ranks, and with the parts of the model that other ranks hold."""
    steps = steps_of([run])
    for step, found in steps.items():
        ranks = [record["steps"][step] for record in run.records if step in record["steps"]]
        for stage in ("gradients", *HELD) if ranks else ():
            found[stage] = {name: value for each in reversed(ranks) for name, value in each[stage].items()}
        of_samples = ranks if run.job.mesh in DATA else ranks[:1]
        samples = [each for values in of_samples for part in values["samples"].values() for each in part]
        found["samples"] = {"samples": tuple(sorted(samples))} if ranks else {}
    return steps


def differences(one: Steps, other: Steps, stages: Sequence[str] = STAGES) -> Iterator[Difference]:
    """Of steps that both have, and of their number."""
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for found in one.values():
        for stage in ("logged", "rates"):
            for name, value in found.get(stage, {}).items():
                largest[stage, name] = max(abs(value), largest[stage, name])
    for step in sorted(one.keys() & other.keys()):
        for stage in stages:
            ours, theirs = one[step].get(stage, {}), other[step].get(stage, {})
            for name in ours if stage == "logged" else {**ours, **theirs}:
                a, b = ours.get(name), theirs.get(name)
                if repr(_bits(a)) != repr(_bits(b)):
                    yield Difference(step, stage, name, a, b, _distance(a, b, largest[stage, name]))
    ends = [steps[0]["steps"]["steps trained"] for steps in (one, other)]
    if ends[0] != ends[1]:
        yield Difference(min(ends), "steps", "steps trained", ends[0], ends[1], math.inf)


def _bits(value: Any) -> Any:
    return value.digest if isinstance(value, Summary) else value


def _distance(one: Any, other: Any, largest: float) -> float:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) / (largest or 1.0)
    if not isinstance(one, Summary) or not isinstance(other, Summary) or one.values.shape != other.values.shape:
        return math.inf
    size = float(np.linalg.norm(one.values)) or float(np.linalg.norm(other.values)) or 1.0
    return float(np.linalg.norm(one.values - other.values)) / size


def first_difference(
    one: Sequence[Run], other: Sequence[Run], unstable: Collection[tuple[int, str]] | None
) -> Difference | None:
    """The first bit that differs on any rank, but for unstable logged values, such as times; None leaves out all."""
    for rank in range(len(one[0].records)):
        for found in differences(steps_of(one, rank), steps_of(other, rank)):
            if found.stage != "logged" or (unstable is not None and (found.step, found.name) not in unstable):
                return found
    return None


def beyond_rounding(one: Run, other: Run, moved: Run, counts: Callable[[Difference], bool]) -> Difference | None:
    """The first value of `other`, on any ranks, that differs from `one`'s by more than rounding.

    How far that goes is measured by `moved`, a run whose weights were moved by a little more than rounding.
    """
    steps, stages = joined(one), STAGES[1:]
    reached: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for each in differences(steps, joined(moved), stages):
        reached[each.stage, each.name].append(each)
    for found in differences(steps, joined(other), stages):
        near = (each.distance for each in reached[found.stage, found.name] if each.step <= found.step)
        is_in_both = found.one is not None and found.other is not None
        if is_in_both and counts(found) and not found.distance <= LEAST + FACTOR * max(near, default=0.0):
            return found
    return None


def ranks_differ(run: Run) -> Difference | None:
    """The first thing that ranks should hold alike, and do not."""
    ranks = [steps_of([run], rank) for rank in range(len(run.records))]
    found = [next(differences(ranks[0], other, HELD), None) for other in ranks[1:]]
    return min((each for each in found if each is not None), key=lambda each: each.step, default=None)


def attributes_apart(
    one: Mapping[str, Any], other: Mapping[str, Any], again: Mapping[str, Any] | None = None
) -> list[str]:
    """Plain attributes that training changes, and that end with other values in another run, but not in `again`.

    Dicts of which the other run has a part are none: those of caches, and of records by step.
    """
    found: list[str] = []
    for path, value in one["end"].items():
        theirs = other["end"].get(path)
        is_part = isinstance(value, dict) and isinstance(theirs, dict) and theirs.items() <= value.items()
        is_steady = again is None or again["end"].get(path) == value
        if value not in (theirs, one["start"].get(path)) and is_steady and not is_part:
            found.append(path)
    return found


def other_files(alone: Run, again: Run, resumed: Run) -> list[str]:
    """Files of the user's in the run's directory that undisturbed runs have alike, and the resumed one has not."""
    ours, same, theirs = (_files(Path(run.job.runs_dir)) for run in (alone, again, resumed))
    return [name for name, content in ours.items() if same.get(name) == content != theirs.get(name)]


def _files(directory: Path) -> dict[str, bytes | list[str]]:
    found: dict[str, bytes | list[str]] = {}
    for file in sorted(directory.rglob("*")):
        inside = file.relative_to(directory)
        if file.is_file() and file.suffix == ".jsonl":
            found[str(inside)] = sorted(map(_without_values, file.read_text().splitlines()))
        elif file.is_file() and "checkpoints" not in inside.parts:
            found[str(inside)] = file.read_bytes()
    return found


def _without_values(line: str) -> str:
    """A log's step and names; some values are times."""
    try:
        values = json.loads(line)
    except ValueError:
        return line
    return str((values.get("step"), sorted(values)) if isinstance(values, dict) else values)
