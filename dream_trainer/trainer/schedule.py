"""When training ends, when a validation is due, and when the time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from dream_trainer.config.training_parameters import TrainingParameters
from dream_trainer.trainer.counters import Counters


def limits(parameters: TrainingParameters) -> tuple[float, float, float]:
    """Epochs, optimizer steps and samples after which training ends; infinity where there is no limit."""
    max_steps = 1 if parameters.fast_dev_run else parameters.max_steps
    epochs, steps, samples = (
        math.inf if limit is None else limit for limit in (parameters.epoch_limit, max_steps, parameters.max_samples)
    )
    return epochs, steps, samples


class Schedule:
    """The clock side of a run's schedule.

    Args:
        parameters: The schedule.
        clock: Seconds from any origin; tests pass their own.

    Attributes:
        goes_by_the_clock: Whether anything is due by the clock.
    """

    def __init__(self, parameters: TrainingParameters, clock: Callable[[], float] = time.monotonic) -> None:
        self._parameters = parameters
        self._clock = clock
        self._started = self._last_validation = clock()
        self._before = 0.0
        self._is_running = False
        self._limit_seconds = None if parameters.max_time is None else parameters.max_time.total_seconds()
        self.goes_by_the_clock = parameters.max_time is not None or parameters.val_every_minutes is not None
        self._validates = self.validation_batches != 0

    @property
    def validation_batches(self) -> int | None:
        """Batches per rank of one validation; None for all."""
        return 1 if self._parameters.fast_dev_run else self._parameters.val_steps_per_epoch

    def start(self, progress: Counters) -> None:
        """Training starts now, after `progress.elapsed_seconds` in earlier processes."""
        self._started = self._last_validation = self._clock()
        self._before = progress.elapsed_seconds
        self._is_running = True

    def update(self, progress: Counters) -> None:
        """Writes the time of training into the counters, while training runs."""
        if self._is_running:
            progress.elapsed_seconds = self.elapsed_seconds()

    def stop(self) -> None:
        """Training ends now; what comes until it starts again does not count."""
        self._is_running = False

    def elapsed_seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._before + self._clock() - self._started

    def time_is_up(self) -> bool:
        """Whether `max_time` has passed on this rank's clock."""
        return self._limit_seconds is not None and self.elapsed_seconds() >= self._limit_seconds

    def validation_is_due_by_the_clock(self) -> bool:
        """Whether `val_every_minutes` have passed since the last validation, on this rank's clock."""
        minutes = self._parameters.val_every_minutes
        return minutes is not None and self._clock() - self._last_validation >= 60 * minutes

    def validation_is_due(self, progress: Counters, *, stepped: bool, epoch_ended: bool, by_the_clock: bool) -> bool:
        """Whether to validate after the window just completed.

        Args:
            progress: Counters; `current_epoch` does not count the epoch that ends with this window.
            stepped: Whether the window counted as an optimizer step.
            epoch_ended: Whether this window ended an epoch.
            by_the_clock: Whether rank 0's clock says so.
        """
        if not self._validates:
            return False
        parameters = self._parameters
        if parameters.fast_dev_run or by_the_clock:
            return True
        steps, epochs = parameters.val_every_n_steps, parameters.val_every_n_epochs
        if steps is not None and stepped and progress.global_step % steps == 0:
            return True
        return epoch_ended and epochs is not None and (progress.current_epoch + 1) % epochs == 0

    def validated(self) -> None:
        """A validation is done; the clock for the next starts."""
        self._last_validation = self._clock()
