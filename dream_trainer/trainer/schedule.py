"""Schedule: when an epoch and the run end, when a validation is due, when the time is up, and pending work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from dream_trainer.cadence import Cadence
from dream_trainer.config.training_parameters import TrainingParameters
from dream_trainer.trainer.counters import Counters, Owed


class Schedule:
    """A run's limits and what is due between its windows."""

    def __init__(
        self, parameters: TrainingParameters, progress: Counters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._clock = clock
        self._started, self._before, self._is_running = clock(), 0.0, False
        self.follow(parameters)

    def follow(self, parameters: TrainingParameters) -> None:
        """Limits and intervals are those of `parameters` from now on; between two calls of `fit`."""
        self._parameters = parameters
        self._validations = Cadence(
            steps=parameters.val_every_n_steps,
            epochs=parameters.epochs_between_validations,
            minutes=parameters.val_every_minutes,
            clock=self._clock,
        )
        self._limit_seconds = None if parameters.max_time is None else parameters.max_time.total_seconds()
        self.goes_by_the_clock = self._limit_seconds is not None or self._validations.goes_by_the_clock
        self.epoch_steps = 1 if parameters.fast_dev_run else parameters.train_steps_per_epoch
        self._max_epochs = _limit(parameters.epoch_limit)
        self.max_steps = _limit(1 if parameters.fast_dev_run else parameters.max_steps)
        self._max_samples = _limit(parameters.max_samples)
        self.max_tokens = _limit(parameters.max_tokens)  # tokens after which training ends; as above
        self._validates = self.validation_batches != 0

    # -- limits

    def limit_is_reached(self, *, epochs: int) -> bool:
        progress = self._progress
        return (
            epochs >= self._max_epochs
            or progress.global_step >= self.max_steps
            or progress.samples_seen >= self._max_samples
            or progress.tokens_seen >= self.max_tokens
        )

    def is_last_window(self) -> bool:
        """Whether a limit is reached with the window just completed, its epoch's end included."""
        progress = self._progress
        return self.limit_is_reached(epochs=progress.current_epoch + bool(progress.owed and progress.owed.epoch_ended))

    def is_finished(self) -> bool:
        """Whether a limit is reached, and nothing is owed."""
        return self._progress.owed is None and self.limit_is_reached(epochs=self._progress.current_epoch)

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
        self._validations.restart()
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

    @property
    def validation_batches(self) -> int | None:
        """Batches per rank of one validation; None for all."""
        return 1 if self._parameters.fast_dev_run else self._parameters.val_steps_per_epoch

    def validation_is_due_by_the_clock(self) -> bool:
        """Whether `val_every_minutes` have passed since the last validation, on this rank's clock."""
        return self._validations.is_due_by_the_clock()

    def validation_is_due(self, *, stepped: bool, epoch_ended: bool, by_the_clock: bool) -> bool:
        """Whether to validate after the window just counted."""
        if not self._validates:
            return False
        if self._parameters.fast_dev_run or by_the_clock:
            return True
        progress = self._progress
        step, epoch = progress.global_step if stepped else None, progress.current_epoch + 1 if epoch_ended else None
        return self._validations.is_due(step, epoch)

    def validated(self) -> None:
        self._validations.restart()

    def owe(self, *, stepped: bool, epoch_ended: bool, validates: bool) -> None:
        """Notes what is to be done after the window just counted, for a checkpoint that is saved before it is."""
        self._progress.owed = Owed(stepped, epoch_ended, validates) if validates or epoch_ended else None


def _limit(value: int | None) -> float:
    return math.inf if value is None else value
