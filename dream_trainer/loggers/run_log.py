"""RunLog: the way of a run's numbers, from where they are logged to its history, its loggers and who listens.

    add, add_result -> buffer (on the device) -> flush every n steps (one copy, read a step later so that nobody waits,
    and one collective) -> history and `notify` on every rank, loggers on rank 0

What is logged in a micro-batch waits for the batch's weight, and with its window: one that runs again is counted once.
Validation metrics are exact when they come, and written at once. What was logged and not yet flushed is saved, and so
is how many lines the step has, so that a resumed run writes the same lines, each once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from dream_trainer.cadence import Cadence
from dream_trainer.cleanup import followed_by
from dream_trainer.config.logger_parameters import LoggerParameters
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.loggers.buffer import Flight, MetricBuffer, check_reduction, keep
from dream_trainer.loggers.formatting import format_metrics
from dream_trainer.loggers.group import LoggerGroup
from dream_trainer.loggers.interface import Stamp
from dream_trainer.loggers.line_files import read_jsonl
from dream_trainer.loggers.media_files import MediaQueue

logger = logging.getLogger("dream_trainer")


class RunLog:
    """One run's numbers and media on this rank; every rank has one and calls it alike.

    Attributes:
        metrics: Where training's values go.
        own_line: Where the values go that listeners to the end of a validation or of an epoch log; None while none of
            them runs.
        media: Images and such that wait for their window.
        history: The lines so far.
    """

    __slots__ = (
        "_cadence",
        "_coming_again",
        "_config",
        "_flight",
        "_flushed_step",
        "_has_ended",
        "_hear",
        "_loggers",
        "_notify",
        "_of_data",
        "_of_rank",
        "_own_line_counts",
        "_resumed_step",
        "_run",
        "_run_dir",
        "_saved_step",
        "_stamp",
        "_undecided",
        "_world",
        "history",
        "media",
        "metrics",
        "own_line",
    )

    def __init__(
        self,
        parameters: LoggerParameters,
        run_dir: Path,
        run: Sequence[str],
        *,
        config: Callable[[], dict[str, Any]],
        stamp: Callable[[], Stamp],
        notify: Callable[[dict[str, float], int], None],
        of_data: Callable[[], Mapping[str, float]],
        of_rank: Callable[[], Mapping[str, float]],
        hear: Callable[[Mapping[str, Sequence[float]]], None],
    ) -> None:
        self._run_dir = run_dir
        self._run = list(run)
        self._config = config
        self._stamp = stamp
        self._notify = notify
        self._of_data = of_data
        self._of_rank = of_rank
        self._hear = hear
        self._cadence = Cadence(steps=parameters.log_every_n_steps)
        self._world = Ranks.alone()
        self._loggers: LoggerGroup | None = None  # on rank 0; opened when there is something to write
        self.metrics = MetricBuffer()
        self.media = MediaQueue()
        self.history = History(parameters.history_lines)
        # Values logged in the running micro-batch, which may yet get a backward weight; each with its batch's size.
        self._undecided: list[tuple[str, Tensor | float, str, int]] = []
        self._flight: tuple[Flight, Stamp] | None = None  # a flush that nobody has waited for yet
        self._flushed_step = 0
        self._has_ended = False
        self.own_line: MetricBuffer | None = None
        self._own_line_counts = False
        self._resumed_step: int | None = None
        # Names in the lines of the resumed step that a process wrote after the checkpoint: they come again.
        self._coming_again: list[set[str]] = []
        # Step of the checkpoint, saved or loaded last, that has what was not yet flushed there.
        self._saved_step: int | None = None

    def connect(self, world: Ranks, loggers: LoggerGroup | None) -> None:
        """The ranks are there, and on rank 0 the loggers."""
        self._world = world
        self._loggers = loggers

    # -- a micro-batch

    def add_undecided(self, name: str, value: Tensor | float, reduce: str, size: int) -> None:
        """Takes a value of the running micro-batch: it counts by the batch's weight, or by its `size` if it has none.

        Raises:
            TypeError: The value is not a scalar.
            ValueError: The reduction is unknown.
        """
        check_reduction(name, reduce)
        self._undecided.append((name, keep(name, value), reduce, size))

    def batch_finished(self, weight: Tensor | float | None) -> None:
        """A micro-batch is through; `weight` is its backward weight, if it has one."""
        self._has_ended = False
        if self._undecided:
            self._decide(weight)

    def _decide(self, weight: Tensor | float | None) -> None:
        """Gives the values that wait for it the backward weight, or their batch's size where there is none."""
        undecided, self._undecided = self._undecided, []  # one that is refused is refused once
        for name, value, reduce, size in undecided:
            self.metrics.add(name, value, size if weight is None else weight, reduce)

    @property
    def is_to_be_opened(self) -> bool:
        """Whether loggers wait for something to write."""
        return self._loggers is not None and not self._loggers.is_open

    def open_early(self) -> None:
        """Before a batch of training or its validations: opens what the user's code may write to by itself."""
        if self._loggers is not None and not self._loggers.is_open_early:
            self._loggers.open_early(self._run_dir, self._config(), self._resumed_step)

    def open_if_needed(self) -> bool:
        """Opens the loggers if something was logged, which may take seconds; returns whether it was."""
        has_values = self.metrics.has_values()
        if has_values:
            self._opened_loggers()
        return has_values

    # -- a window

    def window_started(self) -> None:
        """What comes from here on belongs to the next window."""
        if self._loggers is not None and not self._loggers.is_open_early:
            self.open_early()
        if self._undecided:
            self._decide(None)
        self.metrics.mark()
        self.media.before_window = len(self.media.waiting)

    def window_dropped(self) -> None:
        """Forgets what was logged since `window_started`: the window runs again."""
        self._undecided.clear()
        self.metrics.rewind()
        self.media.window_dropped()

    def window_finished(self, step: int, *, is_last: bool = False, is_stopped: bool = False) -> None:
        """After a window and its events."""
        if self._flight is not None or self.media.waiting:
            self.land()
        if is_last:
            self._has_ended = not (is_stopped and self._pending_is_saved(step))
        if self._has_ended or self._cadence.is_due(step):
            self._flush_if_due(step)
        if is_last:
            self.land()

    def fit_ended(self, step: int) -> None:
        """After `land`: writes what the last events logged, as of the run's last epoch, unless a resumed run will.

        A collective.
        """
        if not self._pending_is_saved(step):
            self._decide(None)
            self._write(self.metrics.reduce(self._world), self._stamp())

    def _flush_if_due(self, step: int) -> None:
        """Starts what was logged on its way to the host, stamped with this step; `land` writes it."""
        if step != self._flushed_step and (self._has_ended or self._cadence.is_due(step)):
            self._decide(None)
            self._flushed_step = step
            for name, value in self._of_data().items():
                self.metrics.add(name, value, 1.0, "last")
            for name, value in self._of_rank().items():
                self.metrics.add_of_rank(name, value)
            self._flight = self.metrics.begin(), self._stamp()

    def _pending_is_saved(self, step: int) -> bool:
        """Whether a checkpoint has what is not yet flushed; the run that goes on from there writes it."""
        return self._saved_step == step and not self._has_ended

    def land(self) -> None:
        """Writes what is on its way; a collective, between windows."""
        if self._flight is not None:
            (flight, stamp), self._flight = self._flight, None
            self._write(self.metrics.finish(flight, self._world), stamp)
            if self.metrics.of_ranks:
                self._hear(self.metrics.of_ranks)
        for name, item, known in self.media:
            self._opened_loggers().log_media(name, item, known or self._stamp())
        self.media.clear()

    # -- a validation

    def validated(self, metrics: dict[str, float]) -> None:
        """Writes a validation's metrics and media."""
        self.media.validated(self._stamp())
        self.land()
        self._write(metrics, self._stamp())

    @contextmanager
    def line_of_its_own(self, *, counts: bool) -> Iterator[None]:
        """What is logged inside is of the validation or the epoch that has just ended, and has nothing to do with
        training's next line: written at the end. One inside may evaluate, which comes here too."""
        before = self.own_line, self._own_line_counts
        self.own_line, self._own_line_counts = MetricBuffer(), counts
        try:
            yield
            self._write_own_line()
        finally:
            self.own_line, self._own_line_counts = before

    def _write_own_line(self) -> None:
        """A collective; also before a listener saves, since a resumed run does not go there again."""
        mine, self.own_line = self.own_line, None  # what listeners to on_log log is training's
        if mine is not None and self._own_line_counts:
            self._write(mine.reduce(self._world), self._stamp())
        self.own_line = mine

    # -- a line

    def _write(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Hands reduced metrics, equal on all ranks, to the loggers of rank 0 and to everyone who listens."""
        if not metrics:
            return
        if self._coming_again and stamp.step == self._resumed_step and metrics.keys() in self._coming_again:
            self._coming_again.remove(set(metrics))
        else:
            self.history.append(stamp._asdict() | metrics)
            if self._world.is_main:
                self._opened_loggers().log(metrics, stamp)
        self._notify(metrics, stamp.step)

    def _lines_of(self, step: int) -> list[dict[str, float]]:
        """The last lines, as far as they are of this step."""
        return list(takewhile(lambda line: line["step"] == step, reversed(self.history)))[::-1]

    def _opened_loggers(self) -> LoggerGroup:
        assert self._loggers is not None  # on rank 0, once connected
        if not self._loggers.is_open:
            self._loggers.open(self._run_dir, self._config(), self._resumed_step)
        return self._loggers

    # -- state

    def state(self, step: int, *, is_last: bool, has_failed: bool) -> dict[str, Any]:
        """What a checkpoint keeps, equal on all ranks; a collective.

        Args:
            is_last: Whether the run's last window is done. What it logged is written now, and not saved to be written
                again: a listener may save at the window's end, before `window_finished`.
        """
        self.land()
        self._write_own_line()
        flushed_before = self._flushed_step
        if not has_failed:
            self._has_ended |= is_last
            self._flush_if_due(step)
            self.land()
        self._decide(None)
        pending = None
        if not self._has_ended:
            pending, self._saved_step = self.metrics.state_dict(self._world), step
        # Loggers are rank 0's alone, and what is saved is equal on all ranks.
        states = self._world.broadcast_object(None if self._loggers is None else self._loggers.state_dict())
        state = {
            "step": step,
            "flushed_step": self._flushed_step,
            "lines": len(self._lines_of(step)),
            "pending": pending,
            "run": self._run,
            "loggers": states,
        }
        self._flushed_step = flushed_before  # what listeners after the saving one log has another line of this step
        return state

    def save_was_lost(self) -> None:
        """No checkpoint has the state that was given last."""
        self._saved_step = None

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave."""
        if self._loggers is not None:
            self._loggers.close()
        self._flight = None
        self._undecided.clear()
        self.media.clear()
        self._has_ended = False
        self._resumed_step = self._saved_step = step = state["step"]
        self._flushed_step = state["flushed_step"]
        self.history.replace([line for line in self.history if line["step"] <= step])
        path = self._run_dir / "metrics.jsonl"
        if not self.history and path.exists():
            self.history.replace(read_jsonl(path, step))
        self.metrics = MetricBuffer()
        if state["pending"] is not None:
            self.metrics.load_state_dict(state["pending"], self._world)
        # The checkpoint may be another run's, which this one branches off from.
        is_own = state.get("run") == self._run
        if self._loggers is not None and is_own:
            self._loggers.load_state_dict(state["loggers"])
        # A validation or a flush may have been due when the checkpoint was saved, and have been done and written since.
        lines = self._lines_of(step)
        later = lines[state.get("lines", len(lines)) :] if is_own else []
        self._coming_again = [line.keys() - set(Stamp._fields) for line in later]

    # -- the end

    def close(self, step: int, *, has_trained: bool) -> None:
        """Writes the rest, or says what a resumed run will write, and closes the loggers."""
        with followed_by(self._close_loggers):
            if has_trained:
                self.land()
                self._write_or_say_the_rest(step)

    def _write_or_say_the_rest(self, step: int) -> None:
        if not self._pending_is_saved(step):
            self.fit_ended(step)
            return
        self._decide(None)
        values = self.metrics.reduce(self._world)
        if values and self._world.is_main:
            logger.warning(
                "logged since the last line, and to be written when the run is resumed: step %d | %s",
                step,
                format_metrics(values),
            )

    def _close_loggers(self) -> None:
        if self._loggers is not None:
            ended, self._loggers = self._loggers, LoggerGroup([], lambda key, message: None, strict=False)
            ended.close()  # what is logged from here on goes nowhere


Line = dict[str, float]


class History(list[Line]):
    """The last lines that were logged.

    Attributes:
        dropped: How many older lines are no longer here. metrics.jsonl has them.
    """

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit
        self.dropped = 0

    def append(self, line: Line) -> None:
        """Adds the newest line."""
        super().append(line)
        if self._limit is not None and len(self) > self._limit:
            del self[0]
            self.dropped += 1

    def replace(self, lines: Iterable[Line]) -> None:
        """Has these lines and no others."""
        self.clear()
        self.dropped = 0
        for line in lines:
            self.append(line)

    def __repr__(self) -> str:
        older = f" after {self.dropped} older ones" if self.dropped else ""
        return f"History of {len(self)} lines{older}"
