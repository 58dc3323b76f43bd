"""LoggerMixin: `self.log` from anywhere, window means over time and ranks, and the loggers they are written to.

It owns the way of a number: `log` -> buffer (on the device) -> flush every n steps (one copy, one collective) -> the
loggers (on rank 0) and `on_log`. Validation metrics are exact when they arrive and are written at once, on the same
step axis; a sanity validation, `evaluate` and `predict` write nothing. It saves what was logged and not yet flushed, so
that a resumed run writes the same numbers at the same steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from dream_trainer.config.checks import check_choice, check_integer
from dream_trainer.errors import ConfigError
from dream_trainer.loggers.base import Logger, Stamp
from dream_trainer.loggers.buffer import MetricBuffer, keep
from dream_trainer.trainer.abstract import AbstractTrainer

LoggerName = Literal["console", "jsonl"]
logger = logging.getLogger("dream_trainer")


@dataclass(frozen=True, kw_only=True)
class LoggerParameters:
    """Where numbers go and how often.

    Raises:
        ConfigError: A value cannot work.
    """

    loggers: tuple[LoggerName, ...] = ("console", "jsonl")
    """Loggers to write to: "console" prints lines, "jsonl" appends to metrics.jsonl in the run directory."""
    log_every_n_steps: int = 10
    """Optimizer steps between flushes; a flush waits for the device once, so 10 hides it."""

    def __post_init__(self) -> None:
        for name in self.loggers:
            check_choice("loggers", name, get_args(LoggerName))
        if len(set(self.loggers)) != len(self.loggers):
            raise ConfigError(f"loggers={self.loggers} names one logger twice. Name each once.")
        check_integer("log_every_n_steps", self.log_every_n_steps, minimum=1)


@dataclass(kw_only=True)
class LoggerConfigMixin:
    """Config of LoggerMixin."""

    logger_parameters: LoggerParameters = field(default_factory=LoggerParameters)
    """Where numbers go and how often."""


class LoggerMixin(AbstractTrainer):
    """Logging from anywhere in the trainer.

    What `training_step` returns is logged under `train/`: numbers and tensors of one element, nested dicts as
    `train/outer/inner`; anything else in it is for `post_train_batch` and passed over. What `log` gets keeps its name.
    Override `configure_loggers` to write somewhere of your own.
    """

    _config_class: ClassVar[type] = LoggerConfigMixin

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._metrics = MetricBuffer()
        # Values logged in the running micro-batch, which may yet get a backward weight; each with its batch's size.
        self._undecided: list[tuple[str, Tensor | float, str, int]] = []
        self._loggers: list[Logger] | None = None  # opened with the first line, once a resume is through
        self._resumed_step: int | None = None
        self._flushed_step = 0
        self._run_has_ended = False

    def configure_loggers(self) -> list[Logger]:
        """The loggers, by `logger_parameters.loggers`. Called on rank 0 alone; an override may add to `super()`'s."""
        return [_build(name) for name in self.config.logger_parameters.loggers]

    def log(
        self, name: str, value: Tensor | float, *, weight: Tensor | float | None = None, reduce: str = "mean"
    ) -> None:
        """Logs a value; the loggers get it reduced over all micro-batches and ranks since the last flush.

        Nothing waits for the device. Ranks need not log the same names. A tensor that you will change in place
        afterwards is to be logged as its `clone()`.

        Args:
            name: As the loggers will show it. In validation `val/` (and the loader's name) is put before it, if it is
                not there.
            value: A number or a tensor of one element.
            weight: Weight in the mean; zero counts for nothing under any reduction. Default: the micro-batch's backward
                weight if it has one, else its batch size; 1 before the first batch.
            reduce: "mean", "sum", "min", "max" or "last" (on the highest rank that logged it).

        Raises:
            TypeError: The value is no scalar.
            ValueError: The name belongs to the stamp of a line, or had another reduction before.
        """
        if self._val_buffer is not None:
            own = self._val_weight if weight is None else weight
            self._val_buffer.add(name.removeprefix("val/"), value, own, reduce)
            return
        if name in Stamp._fields:
            raise ValueError(
                f"metric {name!r} would hide the {name} that each line has. Use another name, such as 'my/{name}'."
            )
        if weight is None and self._is_ready and self._batch is not None:
            weight = self._accumulation.batch_weight
            if weight is None:
                self._undecided.append((name, keep(name, value), reduce, self._samples_in_batch()))
                return
        self._metrics.add(name, value, 1.0 if weight is None else weight, reduce)

    # -- the way of a number

    def _log_step(self, prefix: str, result: dict[str, Any], weight: Any) -> None:
        super()._log_step(prefix, result, weight)
        self._run_has_ended = False
        if result:
            own = self._samples_in_batch() if weight is None else weight
            self._metrics.add_result(result, own, f"{prefix}/")
        if self._undecided:
            self._decide(weight)

    def _decide(self, weight: Tensor | float | None) -> None:
        """Gives the values that wait for it the backward weight, or their batch's size where there is none."""
        for name, value, reduce, size in self._undecided:
            self._metrics.add(name, value, size if weight is None else weight, reduce)
        self._undecided.clear()

    def _window_dropped(self) -> None:
        super()._window_dropped()
        self._undecided.clear()
        self._metrics.rewind()

    def _window_finished(self, *, is_last: bool) -> None:
        super()._window_finished(is_last=is_last)
        self._run_has_ended = is_last
        self._metrics.mark()
        step = self.global_step
        if (step % self.config.logger_parameters.log_every_n_steps == 0 or is_last) and step != self._flushed_step:
            self._flush()

    def _flush(self) -> None:
        self._decide(None)
        self._flushed_step = self.global_step
        self._write(self._metrics.reduce(self.world))

    def _validated(self, metrics: dict[str, float]) -> None:
        super()._validated(metrics)
        self._write(metrics)

    def _write(self, metrics: dict[str, float]) -> None:
        """Hands reduced metrics, equal on all ranks, to the loggers of rank 0 and to everyone who listens."""
        if not metrics:
            return
        step = self.global_step
        if self.world.is_main:
            stamp = Stamp(step, self.current_epoch, self.samples_seen, time.time())
            for target in self._open_loggers():
                self._guarded(target, partial(target.log, metrics, stamp))
        self._notify("on_log", metrics, step)

    # -- loggers, on rank 0

    def _open_loggers(self) -> list[Logger]:
        if self._loggers is None:
            from dream_trainer.config.serialize import to_dict

            config = to_dict(self.config)
            self._loggers = [
                target
                for target in self.configure_loggers()
                if self._guarded(target, partial(target.open, self.run_dir, config, self._resumed_step))
            ]
        return self._loggers

    def _guarded(self, target: Logger, act: Callable[[], None]) -> bool:
        """Runs `act`; a logger that fails is reported once and never stops training."""
        try:
            act()
        except Exception as exc:
            name = type(target).__name__
            self._say_once(
                f"logger {id(target)}",
                f"{name} failed and may miss lines; training goes on. {type(exc).__name__}: {exc}",
            )
            return False
        return True

    def _close_loggers(self) -> None:
        for target in self._loggers or []:
            self._guarded(target, target.close)
        self._loggers = None

    # -- state and end

    def _mixin_state(self) -> dict[str, Any]:
        # A collective: pending values of all ranks go into the one state. After the last window they are written by
        # `_close`, so they are not saved to be written again.
        self._decide(None)
        pending = None if self._run_has_ended else self._metrics.state_dict(self.world)
        mine = {"step": self.global_step, "flushed_step": self._flushed_step, "pending": pending}
        return super()._mixin_state() | {"logger": mine}

    def _load_mixin_state(self, state: dict[str, Any]) -> None:
        super()._load_mixin_state(state)
        if "logger" not in state:
            return
        mine = state["logger"]
        self._close_loggers()
        self._resumed_step, self._flushed_step = mine["step"], mine["flushed_step"]
        if mine["pending"] is not None:
            self._metrics.load_state_dict(mine["pending"], self.world)

    def _close(self) -> None:
        self._flush()
        self._close_loggers()
        super()._close()


def _build(name: LoggerName) -> Logger:
    if name == "console":
        from dream_trainer.loggers.console import ConsoleLogger

        return ConsoleLogger()
    from dream_trainer.loggers.jsonl import JSONLLogger

    return JSONLLogger()
