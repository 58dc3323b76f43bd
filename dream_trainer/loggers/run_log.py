"""RunLog: a run's numbers on their way from `log` to its history, loggers and listeners. A flush every n steps copies
once, is read a step later and uses one collective. A window that runs again counts once. Checkpoints keep numbers that
were not flushed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from dream_trainer.cadence import Cadence
from dream_trainer.checks import refuse
from dream_trainer.config.logger_parameters import LoggerParameters, logger_entry
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import ConfigError, HookError, call_each, followed_by
from dream_trainer.events.collection import numbered
from dream_trainer.loggers.buffer import Flight, Record, Records, Scalar, Stamp, TrainingRecord
from dream_trainer.loggers.interface import Logger, Media, MediaLog
from dream_trainer.loggers.line_files import read_jsonl

_FAILED = object()
# Names for pip of modules that are called otherwise.
_DISTRIBUTIONS = {"PIL": "pillow", "google_crc32c": "google-crc32c", "mlflow": "mlflow-skinny"}


class LoggerGroup:
    """Several loggers, opened when training begins."""

    def __init__(self, loggers: list[Logger], report: Callable[[str, str], None], *, strict: bool = False) -> None:
        if not isinstance(loggers, list | tuple) or not all(isinstance(each, Logger) for each in loggers):
            raise HookError(
                f"configure_loggers returned {loggers!r}, which is no list of loggers. Return a list of objects of "
                "classes derived from dream_trainer.loggers.Logger, [] for none."
            )
        self._loggers = loggers
        self._report = report
        self._strict = strict
        self._open: list[Logger] | None = None

    def open(self, run_dir: Path, config: Callable[[], dict[str, Any]], resumed_step: int | None) -> None:
        """Opens the loggers, unless they are open."""
        if self._open is None:
            self._open, plain = [], config() if self._loggers else {}
            for each in self._loggers:
                if self._guarded(each, partial(each.open, run_dir, plain, resumed_step)) is not _FAILED:
                    self._open.append(each)

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        for each in self._open or ():
            self._guarded(each, partial(each.log, metrics, stamp))

    def log_media(self, name: str, media: Media, stamp: Stamp) -> None:
        shown = [self._guarded(each, partial(each.log_media, name, media, stamp)) for each in self._open or ()]
        if all(answer is False for answer in shown):
            kind = type(media).__name__
            self._report(
                f"media {kind}",
                f'{name!r} is written nowhere: no logger takes what is {kind}. Add "tensorboard" or "wandb" to '
                'loggers, "jsonl" for text, tables and histograms, or "images" for images and videos.',
            )

    def close(self) -> None:
        loggers, self._open = self._open or [], None
        call_each([partial(self._guarded, each, each.close) for each in loggers])

    def state_dict(self) -> dict[str, Any]:
        """The loggers' state for a checkpoint, by class and number within the class."""
        states = {key: self._guarded(each, each.state_dict) for key, each in numbered(self._loggers)}
        return {key: state for key, state in states.items() if state and state is not _FAILED}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for key, each in numbered(self._loggers):
            if key in states:
                self._guarded(each, partial(each.load_state_dict, states[key]))

    def _guarded(self, logger: Logger, act: Callable[[], object]) -> object:
        try:
            return act()
        except Exception as exc:
            if self._strict:
                raise
            self._report(
                f"logger {id(logger)}",
                f"{type(logger).__name__} failed and may miss lines; training continues. {type(exc).__name__}: {exc}",
            )
            return _FAILED


def check_loggers(parameters: LoggerParameters) -> list[type[Logger]]:
    """The classes of `parameters.loggers`, in their order, if they can work."""
    classes: list[type[Logger]] = []
    for name in parameters.loggers:
        entry = logger_entry(name)
        try:
            cls = entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f'the logger "{name}" is {entry.value}, which cannot be loaded ({error}). Install what it needs, or '
                f'leave "{name}" out.'
            ) from error
        refuse(
            not (isinstance(cls, type) and issubclass(cls, Logger)),
            f'the logger "{name}" is {entry.value}, which is no class of loggers. Derive it from Logger.',
        )
        missing = [_DISTRIBUTIONS.get(module, module) for module in cls.requires if find_spec(module) is None]
        refuse(
            bool(missing),
            f'loggers={parameters.loggers} names "{name}", whose package {", ".join(missing)} is not installed. '
            f'Run pip install {" ".join(missing)}, or leave "{name}" out.',
        )
        cls.check(parameters)
        classes.append(cls)
    return classes


@dataclass(eq=False, repr=False)
class RunLog:
    """One run's numbers and media on this rank; every rank has one and calls it alike."""

    parameters: LoggerParameters
    run_dir: Path
    run: Sequence[str]
    _: KW_ONLY
    records: Records
    training: TrainingRecord
    config: Callable[[], dict[str, Any]]
    stamp: Callable[[], Stamp]
    notify: Callable[[dict[str, float], int], None]
    of_data: Callable[[], Mapping[str, float]]
    warn_once: Callable[[str, str], None]

    def __post_init__(self) -> None:
        self._media = MediaLog(self.records, Ranks.alone(), self.warn_once)
        self.records.current, self.records.media = self.training, self._media
        self._cadence = Cadence(steps=self.parameters.log_every_n_steps)
        self._world = Ranks.alone()
        self._loggers = LoggerGroup([], self.warn_once)  # with some on rank 0
        self.history: list[dict[str, float]] = []
        self._flight: tuple[Flight, Stamp] | None = None  # a flush that is not read yet
        self._flushed_step = 0
        self._has_ended = False
        self._resumed_step: int | None = None
        # Names in the lines of the resumed step that a process wrote after the checkpoint: they come again.
        self._coming_again: list[set[str]] = []
        # Step of the checkpoint, saved or loaded last, that has what was not yet flushed there.
        self._saved_step: int | None = None

    def connect(self, world: Ranks, loggers: LoggerGroup) -> None:
        self._world = self._media.world = world
        self._loggers = loggers

    # -- training

    def batch_finished(self, result: Mapping[str, Any], weight: Scalar | None, size: int) -> None:
        """Takes a micro-batch's result."""
        training = self.training
        self._has_ended = False
        if result:
            training.metrics.add_result(result, size if weight is None else weight, "train/")
        if training.undecided:
            training.decide(weight)

    def window_started(self) -> None:
        self._opened()
        self.training.window_started()

    def window_finished(self, step: int, *, is_last: bool = False, is_stopped: bool = False) -> None:
        if self._flight is not None or self.training.waiting:
            self.land()
        if is_last:
            self._has_ended = not (is_stopped and self._pending_is_saved(step))
        self._flush_if_due(step)
        if is_last:
            self.land()

    def fit_ended(self, step: int) -> None:
        """Writes the rest, also what the last events logged unless a resumed run will; a collective."""
        self.land()
        if not self._pending_is_saved(step):
            self.training.decide()
            self._write(self.training.metrics.reduce(self._world), self.stamp())

    def _flush_if_due(self, step: int) -> None:
        """Starts copying logged values to the host, stamped with this step; `land` writes them."""
        if step != self._flushed_step and (self._has_ended or self._cadence.is_due(step)):
            self.training.decide()
            self._flushed_step, metrics = step, self.training.metrics
            for name, value in self.of_data().items():
                metrics.add(name, value, 1.0, "last")
            self._flight = metrics.begin(), self.stamp()

    def _pending_is_saved(self, step: int) -> bool:
        """Whether a checkpoint has the values not flushed yet; the run that resumes there writes them."""
        return self._saved_step == step and not self._has_ended

    def land(self) -> None:
        """Writes values in flight; a collective, between windows."""
        training = self.training
        if self._flight is not None:
            (flight, stamp), self._flight = self._flight, None
            self._write(training.metrics.finish(flight, self._world), stamp)
        for name, item, known in training.waiting:
            self._opened().log_media(name, item, known or self.stamp())
        training.waiting.clear()

    # -- a validation, and the end of one or of an epoch

    def validation_started(self, *, is_training: bool) -> None:
        """Forgets the unused media of an earlier validation: `evaluate` and `predict` write nothing."""
        if is_training:
            self._opened()
        self.records.validation_media.clear()

    def validated(self, metrics: dict[str, float]) -> None:
        media, stamp = self.records.validation_media, self.stamp()
        self.training.waiting += [(name, item, stamp) for name, item, _ in media]
        media.clear()
        self.land()
        self._write(metrics, self.stamp())

    @contextmanager
    def line_of_its_own(self, *, counts: bool) -> Iterator[None]:
        """Inside, logs belong to the validation or epoch that has just ended, and are written at the end."""
        record = Record(media=self.training.waiting if counts else None, media_stamp=self.stamp, is_own_line=counts)
        with self.records.inside(record):
            yield
            self._write_own_line()

    def _write_own_line(self) -> None:
        """A collective; also called before a listener saves, since a resumed run does not repeat it."""
        record = self.records.current
        if record.is_own_line:
            with self.records.inside(self.training):  # logs of on_log listeners belong to training
                self._write(record.metrics.reduce(self._world), self.stamp())

    # -- a line

    def _write(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Hands reduced metrics, equal on all ranks, to the loggers of rank 0 and to everyone who listens."""
        if not metrics:
            return
        if self._coming_again and stamp.step == self._resumed_step and metrics.keys() in self._coming_again:
            self._coming_again.remove(set(metrics))
        else:
            self.history.append(stamp._asdict() | metrics)
            if self.parameters.history_lines is not None:
                del self.history[: -self.parameters.history_lines]
            self._opened().log(metrics, stamp)
        self.notify(metrics, stamp.step)

    def _lines_of(self, step: int) -> list[dict[str, float]]:
        return list(takewhile(lambda line: line["step"] == step, reversed(self.history)))[::-1]

    def _opened(self) -> LoggerGroup:
        self._loggers.open(self.run_dir, self.config, self._resumed_step)
        return self._loggers

    # -- state

    def state(self, step: int, *, is_last: bool, has_failed: bool) -> dict[str, Any]:
        """State for checkpoints, equal on all ranks; a collective. The last window is written before it."""
        self.land()
        self._write_own_line()
        flushed_before = self._flushed_step
        if not has_failed:
            self._has_ended |= is_last
            self._flush_if_due(step)
            self.land()
        self.training.decide()
        pending = None
        if not self._has_ended:
            pending, self._saved_step = self.training.metrics.state_dict(self._world), step
        state = {
            "step": step,
            "flushed_step": self._flushed_step,
            "lines": len(self._lines_of(step)),
            "pending": pending,
            "run": list(self.run),
            "loggers": self._world.broadcast_object(self._loggers.state_dict()),  # rank 0's
        }
        self._flushed_step = flushed_before  # later listeners' logs get another line of this step
        return state

    def save_was_lost(self) -> None:
        """No checkpoint has the state that was given last."""
        self._saved_step = None

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._loggers.close()
        self.training.clear()
        self._flight, self._has_ended = None, False
        self._resumed_step = self._saved_step = step = state["step"]
        self._flushed_step = state["flushed_step"]
        self.history[:] = [line for line in self.history if line["step"] <= step]
        path = self.run_dir / "metrics.jsonl"
        if not self.history and path.exists():
            self.history[:] = read_jsonl(path, step)[-(self.parameters.history_lines or 0) :]
        if state["pending"] is not None:
            self.training.metrics.load_state_dict(state["pending"], self._world)
        # The checkpoint may be another run's, which this one branches off from.
        is_own = state.get("run") == list(self.run)
        if is_own:
            self._loggers.load_state_dict(state["loggers"] or {})
        # A validation or a flush may have been due when the checkpoint was saved, and have been done and written since.
        lines = self._lines_of(step)
        later = lines[state.get("lines", len(lines)) :] if is_own else []
        self._coming_again = [line.keys() - set(Stamp._fields) for line in later]

    # -- the end

    def close(self, step: int, *, has_trained: bool) -> None:
        """Writes the rest, unless a resumed run will write it, and closes the loggers."""
        with followed_by(self._close_loggers):
            if has_trained:
                self.fit_ended(step)

    def _close_loggers(self) -> None:
        ended, self._loggers = self._loggers, LoggerGroup([], self.warn_once)
        ended.close()  # logs from here on are dropped
