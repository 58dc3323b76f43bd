"""LoggerMixin: `self.log` and its kin from anywhere, and the loggers that what they get is written to.

It owns the way of a number: `log` -> buffer (on the device) -> flush every n steps (one copy, read a step later so that
nobody waits, and one collective) -> `history` and `on_log` (on every rank) and the loggers (on rank 0). Validation
metrics are exact when they arrive and are written at once, on the same step axis; a sanity validation, `evaluate` and
`predict` write nothing. Images and other media are trainer/media_recording.py's. It saves what was logged and not yet
flushed, so that a resumed run writes the same numbers at the same steps.
"""

from __future__ import annotations

import logging
import time
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, Never, cast

from torch import Tensor

from dream_trainer.cleanup import followed_by
from dream_trainer.config.logger_parameters import LoggerConfigMixin, LoggerParameters, check_packages
from dream_trainer.loggers.buffer import Flight, MetricBuffer, Reduction, check_reduction, keep
from dream_trainer.loggers.formatting import format_metrics
from dream_trainer.loggers.group import LoggerGroup, build_logger
from dream_trainer.loggers.history import History
from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.jsonl import read_jsonl
from dream_trainer.trainer.event_table import anyone_listens
from dream_trainer.trainer.log_options import refuse_unknown, unlogged
from dream_trainer.trainer.media_recording import MediaRecording

logger = logging.getLogger("dream_trainer")


class LoggerMixin(MediaRecording):
    """Logging from anywhere in the trainer.

    What `training_step` returns is logged under `train/`: numbers and tensors of one element, nested dicts as
    `train/outer/inner`; anything else in it is for `post_train_batch` and passed over. What `log` gets keeps its name.
    Override `configure_loggers` to write somewhere of your own.
    """

    _config_class: ClassVar[type | None] = LoggerConfigMixin

    if TYPE_CHECKING:
        config = cast(Any, ...)  # see AbstractTrainer

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        check_packages(config.logger_parameters.loggers)
        self._metrics = MetricBuffer()
        # Values logged in the running micro-batch, which may yet get a backward weight; each with its batch's size.
        self._undecided: list[tuple[str, Tensor | float, str, int]] = []
        self._loggers: LoggerGroup | None = None  # on rank 0; opened when there is something to write
        self._history = History(config.logger_parameters.history_lines)
        self._resumed_step: int | None = None
        # Names in the lines of the resumed step that a process wrote after the checkpoint: they come again.
        self._coming_again: list[set[str]] = []
        self._line_every: int = config.logger_parameters.log_every_n_steps
        self._flushed_step = 0
        # Step of the checkpoint, saved or loaded last, that has what was not yet flushed there.
        self._saved_step: int | None = None
        self._after_validation: MetricBuffer | None = None  # what is logged in post_val_epoch, while that runs
        self._flight: tuple[Flight, Stamp] | None = None  # a flush that nobody has waited for yet
        self._run_has_ended = False

    @property
    def history(self) -> History:
        """The lines that were logged, in order: `step`, `epoch`, `samples`, `time`, then the metrics by name.

        A sequence that grows; it keeps the last `logger_parameters.history_lines`, and metrics.jsonl has all. The same
        on all ranks but for `time`, which is each rank's own clock, and also without any logger. After a resume the
        lines of before come first, read from metrics.jsonl; without that file it begins at the resume.
        """
        return self._history

    def history_of(self, name: str) -> list[tuple[int, float]]:
        """The values of one metric with their steps, in order: `history_of("val/loss")`.

        Inside `fit` none yet is an empty list, since they may come.

        Raises:
            KeyError: Others were logged, and none of that name.
        """
        found = [(int(line["step"]), line[name]) for line in self._history if name in line]
        if not found and self._history and not self._session.is_training:
            names = sorted({key for line in self._history for key in line if key not in Stamp._fields})
            raise KeyError(f"no metric {name!r} was logged; there are {', '.join(names)}.")
        return found

    def configure_loggers(self) -> list[Logger]:
        """The loggers, by `logger_parameters.loggers`. Called on rank 0 alone; an override may add to `super()`'s."""
        parameters: LoggerParameters = self.config.logger_parameters
        return [build_logger(name, parameters) for name in parameters.loggers]

    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
        **unknown: Never,
    ) -> None:
        """Logs a value; the loggers get it reduced over all micro-batches and ranks since the last flush.

        Nothing waits for the device. Ranks need not log the same names. A tensor that you will change in place
        afterwards is to be logged as its `clone()`.

        Args:
            name: As the loggers will show it. In validation `val/` (and the loader's name) is put before it, if it is
                not there; not in `post_val_epoch`, whose values are a line of their own at the validation's step.
            value: A number or a tensor of one element.
            weight: Weight in the mean; zero counts for nothing under any reduction. Default: the micro-batch's backward
                weight if it has one, else its batch size; 1 before the first batch.
            reduce: "mean", "sum", "min", "max" or "last" (on the highest rank that logged it).

        Raises:
            TypeError: The value is no scalar.
            ValueError: The name belongs to the stamp of a line, or had another reduction before.
        """
        if unknown:
            refuse_unknown(unknown)
        if self._validation.buffer is not None:
            own = self._validation.weight if weight is None else weight
            self._validation.buffer.add(name.removeprefix("val/"), value, own, reduce)
            return
        if not self.training:
            where = "a sanity validation" if self.is_sanity_validation else "predict or before a validation's loaders"
            self._say_once("log outside", f"log({name!r}) was called in {where}, where nothing is logged: ignored.")
            return
        if name in Stamp._fields:
            raise ValueError(
                f"metric {name!r} would hide the {name} that each line has. Use another name, such as 'my/{name}'."
            )
        if self._after_validation is not None:
            self._after_validation.add(name, value, 1.0 if weight is None else weight, reduce)
            return
        if weight is None and self._session.is_ready and self._window.batch is not None:
            weight = self._accumulation.batch_weight
            if weight is None:
                check_reduction(name, reduce)
                self._undecided.append((name, keep(name, value), reduce, self._samples_in_batch()))
                return
        self._metrics.add(name, value, 1.0 if weight is None else weight, reduce)

    # -- the way of a number

    def _log_step(self, prefix: str, result: dict[str, Any], weight: Any) -> None:
        super()._log_step(prefix, result, weight)
        if self._run_has_ended:  # an assignment costs a look at who assigns, and this is each batch
            self._run_has_ended = False
        if result:
            own = self._samples_in_batch() if weight is None else weight
            self._metrics.add_result(result, own, f"{prefix}/")
        if self._undecided:
            self._decide(weight)
        # In the first step, which no measurement of the pace counts, and not at the first flush: it may take seconds.
        if self._loggers is not None and not self._loggers.is_open:
            if self._metrics.has_values():
                self._opened_loggers()
            elif not self._events["post_train_batch"]:
                message = unlogged("training_step", result)
                if message is not None:
                    self._say_once("unlogged training_step", message)

    def _decide(self, weight: Tensor | float | None) -> None:
        """Gives the values that wait for it the backward weight, or their batch's size where there is none."""
        undecided, self._undecided = self._undecided, []  # one that is refused is refused once
        for name, value, reduce, size in undecided:
            self._metrics.add(name, value, size if weight is None else weight, reduce)

    def _window_started(self) -> None:
        super()._window_started()
        if self._undecided:
            self._decide(None)
        self._metrics.mark()

    def _window_dropped(self) -> None:
        super()._window_dropped()
        self._undecided.clear()
        self._metrics.rewind()

    def _window_finished(self, *, is_last: bool) -> None:
        if self._flight is not None or self._media:
            self._land()
        super()._window_finished(is_last=is_last)
        if is_last:
            self._run_has_ended = not (self._agreement.stopped and self._pending_is_saved())
        self._flush_if_due()
        if is_last:
            self._land()

    def _flush_if_due(self) -> None:
        step = self.global_step
        is_due = self._run_has_ended or step % self._line_every == 0
        if is_due and step != self._flushed_step:
            self._flush()

    def _pending_is_saved(self) -> bool:
        """Whether a checkpoint has what is not yet flushed; the run that goes on from there writes it."""
        return self._saved_step == self.global_step and not self._run_has_ended

    def _flush(self) -> None:
        """Starts what was logged on its way to the host, stamped with this step; `_land` writes it."""
        self._decide(None)
        self._flushed_step = self.global_step
        self._flight = self._metrics.begin(), self._stamp()

    def _land(self) -> None:
        if self._flight is not None:
            (flight, stamp), self._flight = self._flight, None
            self._write(self._metrics.finish(flight, self.world), stamp)
        super()._land()

    def _validated(self, metrics: dict[str, float]) -> None:
        super()._validated(metrics)
        self._write(metrics, self._stamp())

    def _tell_validated(self, metrics: dict[str, float]) -> None:
        if not anyone_listens(self, "post_val_epoch"):
            super()._tell_validated(metrics)
            return
        # What its listeners log is the validation's, and has nothing to do with training's next line. One of them may
        # evaluate, which comes here too.
        before, self._after_validation = self._after_validation, MetricBuffer()
        try:
            super()._tell_validated(metrics)
            self._write_after_validation()
        finally:
            self._after_validation = before

    def _write_after_validation(self) -> None:
        """A collective; also before a listener saves, since a resumed run does not go there again."""
        mine, self._after_validation = self._after_validation, None  # what listeners to on_log log is training's
        if mine is not None and not (self.is_sanity_validation or self.is_evaluating):
            self._write(mine.reduce(self.world), self._stamp())
        self._after_validation = mine

    def _write(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Hands reduced metrics, equal on all ranks, to the loggers of rank 0 and to everyone who listens."""
        if not metrics:
            return
        if self._coming_again and stamp.step == self._resumed_step and metrics.keys() in self._coming_again:
            self._coming_again.remove(set(metrics))
        else:
            self._history.append(stamp._asdict() | metrics)
            if self.world.is_main:
                self._opened_loggers().log(metrics, stamp)
        self._notify("on_log", metrics, stamp.step)

    def _lines_of(self, step: int) -> list[dict[str, float]]:
        """The last lines, as far as they are of this step."""
        return list(takewhile(lambda line: line["step"] == step, reversed(self._history)))[::-1]

    def _stamp(self) -> Stamp:
        return Stamp(self.global_step, self.current_epoch, self.samples_seen, time.time())

    def _finish_setup(self) -> None:
        super()._finish_setup()
        if self.world.is_main:
            strict = self.config.logger_parameters.strict
            self._loggers = LoggerGroup(self.configure_loggers(), self._say_once, strict=strict)

    def _opened_loggers(self) -> LoggerGroup:
        assert self._loggers is not None  # on rank 0, from setup on
        if not self._loggers.is_open:
            from dream_trainer.config.serialize import to_dict

            self._loggers.open(self.run_dir, to_dict(self.config), self._resumed_step)
        return self._loggers

    def _close_loggers(self) -> None:
        if self._loggers is not None:
            self._loggers.close()

    def _end_loggers(self) -> None:
        if self._loggers is not None:
            ended, self._loggers = self._loggers, LoggerGroup([], self._say_once, strict=False)
            ended.close()  # what is logged from here on goes nowhere

    # -- state and end

    def _save_was_lost(self) -> None:
        super()._save_was_lost()
        self._saved_step = None

    def _mixin_state(self) -> dict[str, Any]:
        # A collective: pending values of all ranks go into the one state. After the last window they are written by
        # `_close`, so they are not saved to be written again.
        self._land()
        self._write_after_validation()
        flushed_before = self._flushed_step
        if not self._session.has_failed:  # what failed may be a logger
            # A listener may save at the window's end, before `_window_finished`, which would write what is saved here.
            self._run_has_ended |= self._schedule.is_last_window()
            self._flush_if_due()
            self._land()
        self._decide(None)
        pending = None
        if not self._run_has_ended:
            pending, self._saved_step = self._metrics.state_dict(self.world), self.global_step
        # Loggers are rank 0's alone, and what is saved is equal on all ranks.
        states = self.world.broadcast_object(None if self._loggers is None else self._loggers.state_dict())
        mine = {
            "step": self.global_step,
            "flushed_step": self._flushed_step,
            "lines": len(self._lines_of(self.global_step)),
            "pending": pending,
            "run": [self.project, self.group, self.experiment],
            "loggers": states,
        }
        self._flushed_step = flushed_before  # what listeners after the saving one log has another line of this step
        return super()._mixin_state() | {"logger": mine}

    def _load_mixin_state(self, state: dict[str, Any]) -> None:
        super()._load_mixin_state(state)
        if "logger" not in state:
            return
        mine = state["logger"]
        self._close_loggers()
        self._flight = None
        self._undecided.clear()
        self._media.clear()
        self._run_has_ended = False
        self._resumed_step = self._saved_step = step = mine["step"]
        self._flushed_step = mine["flushed_step"]
        self._history.replace([line for line in self._history if line["step"] <= step])
        path = self.run_dir / "metrics.jsonl"
        if not self._history and path.exists():
            self._history.replace(read_jsonl(path, step))
        self._metrics = MetricBuffer()
        if mine["pending"] is not None:
            self._metrics.load_state_dict(mine["pending"], self.world)
        # The checkpoint may be another run's, which this one branches off from.
        is_own = mine.get("run") == [self.project, self.group, self.experiment]
        if self._loggers is not None and is_own:
            self._loggers.load_state_dict(mine["loggers"])
        # A validation or a flush may have been due when the checkpoint was saved, and have been done and written since.
        lines = self._lines_of(step)
        later = lines[mine.get("lines", len(lines)) :] if is_own else []
        self._coming_again = [line.keys() - set(Stamp._fields) for line in later]

    def _close(self) -> None:
        with followed_by(super()._close), followed_by(self._end_loggers):
            if self.local_batches > 0:  # evaluate and predict alone write nothing
                self._land()
                self._write_or_say_the_rest()

    def _write_or_say_the_rest(self) -> None:
        self._decide(None)
        values = self._metrics.reduce(self.world)
        if not self._pending_is_saved():
            self._write(values, self._stamp())
        elif values and self.world.is_main:
            logger.warning(
                "logged since the last line, and to be written when the run is resumed: step %d | %s",
                self.global_step,
                format_metrics(values),
            )
