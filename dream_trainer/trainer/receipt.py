"""Receipt: the parts of a run's time over all its starts, from the times that `run.json` keeps.

A start that was killed wrote nothing at its end: the next one reads from the log how far it came, and when.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

from dream_trainer.loggers.formatting import format_duration

_MARKS = 20  # checkpoints of a start whose times are kept: a later start may fall back by some
_LOADED = time.time()
PARTS = {
    "training": "training",
    "again": "steps done twice",
    "validation": "validation",
    "saving": "saving",
    "data": "waiting for data",
    "ranks": "waiting for ranks",
    "starting": "starting up",
    "idle": "idle between starts",
}
"""The parts of a run's time, with their labels."""


@dataclass(kw_only=True)
class Start:
    """One start of a run. Times are in seconds since 1970, durations in seconds of rank 0."""

    began: float  # its process
    trained_from: float  # its loop
    seen: float  # its last sign of life
    first_step: int  # optimizer steps completed when its loop began
    last_step: int  # and at the last sign
    validation: float = 0.0
    saving: float = 0.0  # while training waited for it
    data: float = 0.0
    ranks: float = 0.0  # in collectives of gradients and of sharded weights
    saved: list[list[float]] = field(default_factory=list)  # [step, time] of its checkpoints

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """Of JSON, which may have been written by another version."""
        return cls(**{name: plain[name] for name in cls.__dataclass_fields__ if name in plain})

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def mark(self, step: int, now: float) -> None:
        """A checkpoint of `step` was saved."""
        self.saved = [*self.saved, [step, now]][-_MARKS:]

    def reached(self, step: int) -> float:
        """When it had trained `step`, as far as its checkpoints tell."""
        return max((then for saved, then in self.saved if saved <= step), default=self.trained_from)

    def parts(self, following: Start | None) -> dict[str, float]:
        """Its time by part, and the time until the following start."""
        looped = max(self.seen - self.trained_from, 0.0)
        spent = {name: getattr(self, name) for name in ("validation", "saving", "data", "ranks")}
        spent["training"] = max(looped - sum(spent.values()), 0.0)
        again = 0.0
        if following is not None and following.first_step < self.last_step:
            again = max(self.seen - self.reached(following.first_step), 0.0)
        # Steps trained again later take all of the loop's time since then, in equal shares of its parts.
        stays = 1 - min(again, looped) / looped if looped else 1.0
        idle = 0.0 if following is None else max(following.began - self.seen, 0.0)
        spent = {name: seconds * stays for name, seconds in spent.items()}
        return {**spent, "again": again, "starting": max(self.trained_from - self.began, 0.0), "idle": idle}


@dataclass(frozen=True)
class Receipt:
    """How a run spent its time."""

    seconds: dict[str, float]  # by part, as in PARTS
    starts: int

    @property
    def total(self) -> float:
        """From the first start to the last sign of life."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time spent on steps that are in the final weights."""
        return self.seconds["training"] / self.total if self.total else 0.0

    def words(self) -> str:
        """One line: the goodput, and every part of at least 1% of the time."""
        shown = {name: words for name, words in PARTS.items() if self.seconds[name] > self.total / 100}
        others = [f"{words} {self.seconds[name] / self.total:.0%}" for name, words in shown.items()]
        took = f"{format_duration(self.total)} in {self.starts} start{'s' * (self.starts > 1)}"
        return f"{took}, goodput {self.goodput:.1%}: {', '.join(others)}"


def receipt(starts: Sequence[dict[str, Any]]) -> Receipt | None:
    """From the entries of each start in `run.json`; None without any, as in files of older versions."""
    known = [Start.of(start) for start in starts]
    seconds = dict.fromkeys(PARTS, 0.0)
    for start, following in zip_longest(known, known[1:]):
        for name, spent in start.parts(following).items():
            seconds[name] += spent
    return Receipt(seconds, len(known)) if known else None


def process_began() -> float:
    """When this process began, in seconds since 1970; where the system does not tell, when this module was loaded."""
    try:
        after_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot)
    except (OSError, ValueError, AttributeError, IndexError):
        return _LOADED
