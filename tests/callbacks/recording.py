"""What the callbacks' own tests share: a trainer that logs at every step, and a callback that keeps what was logged."""

import io
from collections.abc import Sequence
from typing import Any

import dream_trainer as dt
from tests.trainer.small import Alone, Sharded, fit, make_config, sgd


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

    def under(self, *prefixes: str) -> dict[int, dict[str, float]]:
        """The metrics whose names begin with one of the prefixes, by step."""
        found = {
            step: {n: v for n, v in metrics.items() if n.startswith(prefixes)} for step, metrics in self.steps.items()
        }
        return {step: metrics for step, metrics in found.items() if metrics}


def record(kind: Any, data: Any, *callbacks: dt.Callback, make_optimizer: Any = sgd, **options: Any) -> Recorder:
    """What a run of one epoch logs at each step, unless `options` of `make_config` say otherwise."""
    recorder = Recorder()
    config = make_config(callbacks=[*callbacks, recorder], **{"log_every": 1, "n_epochs": 1} | options)
    fit(kind(config, data, make_optimizer=make_optimizer))
    return recorder


def names(recorder: Recorder, prefix: str) -> Sequence[str]:
    """Names logged under a prefix."""
    return sorted({name for metrics in recorder.steps.values() for name in metrics if name.startswith(prefix)})
