"""What the callbacks' own tests share: a trainer that logs at every step, and a callback that keeps what was logged."""

import io
from collections.abc import Sequence
from typing import Any

import dream_trainer as dt
from tests.trainer.small import Alone, Sharded, fit


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Logged(Alone, dt.LoggerMixin):
    """One process, with `log`."""


class LoggedSharded(Sharded, dt.LoggerMixin):
    """Any number of processes, sharded, with `log`."""


class Recorder(dt.Callback):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def on_log(self, trainer: Any, metrics: dict[str, float], step: int) -> None:
        self.steps.setdefault(step, {}).update(metrics)

    def values(self, name: str) -> dict[int, float]:
        """One metric by step."""
        return {step: metrics[name] for step, metrics in self.steps.items() if name in metrics}


def record(trainer: Any, recorder: Recorder) -> Recorder:
    """What a whole run of `trainer`, which has `recorder` among its callbacks, logs."""
    fit(trainer)
    return recorder


def names(recorder: Recorder, prefix: str) -> Sequence[str]:
    """Names logged under a prefix."""
    return sorted({name for metrics in recorder.steps.values() for name in metrics if name.startswith(prefix)})
