"""Cadence: when something is due that comes again and again, such as a save, a validation or a line of the log."""

from __future__ import annotations

import time
from collections.abc import Callable


class Cadence:
    """Intervals in steps, epochs or minutes: due when the first one is over; never without any."""

    def __init__(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._epochs = epochs
        self._seconds = None if minutes is None else 60 * minutes
        self._clock = clock
        self._since = clock()
        self.goes_by_the_clock = minutes is not None

    def is_due(self, step: int | None = None, epoch: int | None = None) -> bool:
        """Whether it is due by steps or epochs."""
        if step is not None and self._steps is not None and step % self._steps == 0:
            return True
        return epoch is not None and self._epochs is not None and epoch % self._epochs == 0

    def is_due_by_the_clock(self) -> bool:
        """Whether the minutes have passed since `restart`, or since this was made."""
        return self._seconds is not None and self._clock() - self._since >= self._seconds

    def restart(self) -> None:
        """Called when it was done: the minutes start again."""
        self._since = self._clock()
