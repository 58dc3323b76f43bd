"""OwnTime: how long a rank is busy with its own part of a window, without its waits for other ranks.

All ranks take the same time for a step, since they wait for the slowest in every collective. So the clock of a window
stops when this rank enters a collective of the gradients or of sharded weights, and runs again when it leaves it.
"""

from __future__ import annotations

from time import perf_counter


class OwnTime:
    """One rank's clock on the host: it measures the host's waits for an accelerator, not the device's work.

    Attributes:
        is_wanted: Whether there is another rank to compare with; otherwise windows need not be measured.
        seconds: Time of own work, in all windows.
        windows: Number of windows.
        waited: Seconds between `enter_collective` and `leave_collective`.
    """

    __slots__ = ("_began", "_left", "is_wanted", "seconds", "waited", "windows")

    def __init__(self) -> None:
        self.is_wanted = False
        self.seconds = 0.0
        self.windows = 0
        self.waited = 0.0
        self._began = self._left = 0.0

    def begin_window(self) -> None:
        """A window begins: all ranks have just met in the pulse."""
        self._began = perf_counter()

    def end_window(self) -> None:
        """It is over, and its listeners have been called."""
        self.seconds += perf_counter() - self._began
        self.windows += 1

    def enter_collective(self) -> None:
        """From here on this rank may wait for others."""
        self._left = perf_counter()

    def leave_collective(self) -> None:
        """It has met them."""
        waited = perf_counter() - self._left
        self.waited += waited
        self._began += waited
