"""Counters: a run's progress, as checkpoints keep it. Completed windows and epochs are counted here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dream_trainer.best_value import is_better
from dream_trainer.cadence import Cadence
from dream_trainer.config.checkpoint_parameters import Mode
from dream_trainer.config.training_parameters import TrainingParameters
from dream_trainer.data.window import DataPosition
from dream_trainer.distributed.pulse import Flags


@dataclass(frozen=True, slots=True)
class UnfinishedWork:
    """Work that remains after the last completed window."""

    stepped: bool  # whether it counted as an optimizer step
    epoch_ended: bool  # whether the end of its epoch is left to do
    validates: bool  # whether a validation is left to do


@dataclass(slots=True)
class Counters:
    """How far a run is. Windows and epochs are counted when they are complete, before any listener is called."""

    global_step: int = 0  # accumulation windows completed with at least one `step()`
    current_epoch: int = 0
    batch_idx: int = 0  # micro-batches of this rank completed in the current epoch
    epoch_steps: int = 0  # windows completed in the current epoch
    samples_seen: int = 0  # samples consumed by all ranks
    tokens_seen: int = 0  # tokens of the batches consumed by all ranks, as `batch_tokens` counts them
    skipped_steps: int = 0  # norm not finite, or the total weight zero
    elapsed_seconds: float = 0.0  # of training, earlier processes included, at the last validation or save
    data: DataPosition = field(default_factory=lambda: DataPosition(0, 0, 0))  # the end of the last window
    is_pass_over: bool = False  # whether that window was the last of its pass over the data
    loader_was_replaced: bool = False  # whether `train_dataloader` was assigned again since the run began
    owed: UnfinishedWork | None = None  # a resume does it first

    def finish_window(self, *, stepped: bool, samples: int, tokens: int, end: DataPosition) -> None:
        self.global_step += stepped
        self.epoch_steps += 1
        self.samples_seen += samples
        self.tokens_seen += tokens
        # Only here are the samples of all ranks known where a loader is not ours, and a resume needs them: a batch may
        # hold another number of them by then.
        before = self.data.samples if self.data.epoch == end.epoch else 0
        self.data = end if end.samples else DataPosition(end.epoch, before + samples, end.batches)

    def finish_epoch(self) -> None:
        self.current_epoch += 1
        self.epoch_steps = 0
        self.batch_idx = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        owed = state.get("owed")
        parts = {"data": DataPosition(**state["data"]), "owed": None if owed is None else UnfinishedWork(**owed)}
        for name, value in (state | parts).items():
            setattr(self, name, value)


@dataclass(slots=True)
class BestValues:
    values: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # where they were reached

    def validated(self, metrics: Mapping[str, float], modes: Mapping[str, Mode], step: int) -> None:
        for name, mode in modes.items():
            if is_better(metrics.get(name), self.values.get(name), mode):
                self.values[name], self.steps[name] = metrics[name], step

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.values), "best_steps": dict(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # A checkpoint of before the steps were kept has none.
        self.values, self.steps = dict(state["best"]), dict(state.get("best_steps", {}))


@dataclass(slots=True)  # as this is the step path
class WindowState:
    """What the loop writes down at each batch."""

    training_step: Callable[[Any, int], Any] = field(init=False)  # both since the last start
    validation_step: Callable[[Any, int], Any] = field(init=False)
    batch: Any = None  # the running micro-batch, on the device
    batch_samples: int = 0  # its samples on this rank
    sizes: list[int] = field(default_factory=list)  # samples of each of this rank's batches
    samples: int = 0  # the window's samples over all ranks
    tokens: int = 0  # the window's tokens over all ranks, until they are counted
    flags: Flags = field(default_factory=Flags)  # the flags that all ranks exchanged before it
    gradients_sync: bool = True  # whether the next backward reduces gradients over ranks
    first_batch_idx: int = 0  # number of its first batch in the epoch
    local_batches: int = 0  # training batches processed since this process started
    validation_seconds: float = 0.0  # of validations and predictions between this process's windows


class Schedule:
    """A run's limits, the time, and what is due between its windows."""

    def __init__(self, parameters: TrainingParameters, progress: Counters) -> None:
        self._progress = progress
        self._clock = time.monotonic
        self._started, self._before, self._is_running = self._clock(), 0.0, False
        self.follow(parameters)

    def follow(self, parameters: TrainingParameters) -> None:
        """Limits and intervals are those of `parameters` from now on; between two calls of `fit`."""
        self._parameters = parameters
        self.validations = Cadence(
            steps=parameters.val_every_n_steps,
            epochs=parameters.epochs_between_validations,
            minutes=parameters.val_every_minutes,
        )
        self._limit_seconds = None if parameters.max_time is None else parameters.max_time.total_seconds()
        self.goes_by_the_clock = self._limit_seconds is not None or self.validations.goes_by_the_clock
        self.epoch_steps = 1 if parameters.fast_dev_run else parameters.train_steps_per_epoch
        self._max_epochs = _limit(parameters.epoch_limit)
        self.max_steps = _limit(1 if parameters.fast_dev_run else parameters.max_steps)
        self._max_samples = _limit(parameters.max_samples)
        self.max_tokens = _limit(parameters.max_tokens)  # tokens after which training ends; as above
        # Of each validation, on each rank; None for all.
        self.validation_batches = 1 if parameters.fast_dev_run else parameters.val_steps_per_epoch

    # -- limits

    def is_last_window(self) -> bool:
        """Whether a limit is reached with the window just completed, its epoch's end included."""
        progress = self._progress
        epochs = progress.current_epoch + bool(progress.owed and progress.owed.epoch_ended)
        return (
            epochs >= self._max_epochs
            or progress.global_step >= self.max_steps
            or progress.samples_seen >= self._max_samples
            or progress.tokens_seen >= self.max_tokens
        )

    def is_finished(self) -> bool:
        return self._progress.owed is None and self.is_last_window()

    def epoch_is_over(self, *, is_pass_over: bool) -> bool:
        """Whether the window just counted ends its epoch; `is_pass_over` if it was the last of a pass over the data."""
        return is_pass_over if self.epoch_steps is None else self._progress.epoch_steps >= self.epoch_steps

    def reached_limits(self) -> str:
        """Describes, for a run with nothing left to train, the limits it reached and which to raise."""
        progress = self._progress
        counted = (
            ("n_epochs", "epochs", progress.current_epoch, self._max_epochs),
            ("max_steps", "steps", progress.global_step, self.max_steps),
            ("max_samples", "samples", progress.samples_seen, self._max_samples),
            ("max_tokens", "tokens", progress.tokens_seen, self.max_tokens),
        )
        reached = [(name, f"{done} of {limit} {unit}") for name, unit, done, limit in counted if done >= limit]
        remedy = "Raise " + " and ".join(name for name, _ in reached)
        if self._parameters.fast_dev_run:
            remedy = "Use fast_dev_run=False"
        return f"{' and '.join(text for _, text in reached)} are done. {remedy} to continue"

    # -- the clock

    def start(self) -> None:
        self._started = self._clock()
        self.validations.restart()
        self._before = self._progress.elapsed_seconds
        self._is_running = True

    def update(self) -> None:
        """Writes the time of training into the counters, while training runs."""
        if self._is_running:
            self._progress.elapsed_seconds = self.elapsed_seconds()

    def stop(self) -> None:
        """Training ends now; time until it starts again does not count."""
        self._is_running = False

    def elapsed_seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._before + self._clock() - self._started

    def time_is_up(self) -> bool:
        return self._limit_seconds is not None and self.elapsed_seconds() >= self._limit_seconds

    # -- validations, and pending work

    def validation_is_due(self, *, stepped: bool, epoch_ended: bool, by_the_clock: bool) -> bool:
        if self.validation_batches == 0:
            return False
        if self._parameters.fast_dev_run or by_the_clock:
            return True
        progress = self._progress
        step, epoch = progress.global_step if stepped else None, progress.current_epoch + 1 if epoch_ended else None
        return self.validations.is_due(step, epoch)

    def owe(self, *, stepped: bool, epoch_ended: bool, validates: bool) -> None:
        """Notes what is to be done after the window just counted, for a checkpoint that is saved before it is."""
        self._progress.owed = UnfinishedWork(stepped, epoch_ended, validates) if validates or epoch_ended else None


def _limit(value: int | None) -> float:
    return math.inf if value is None else value
