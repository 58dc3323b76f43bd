"""OwnTime: how long a rank is busy with its own part of a window, without its waits for other ranks.

All ranks take the same time for a step, since they wait for the slowest in every collective. So the clock of a window
is stopped where this rank enters a collective of the gradients or of sharded weights, and goes on where it leaves it.
"""

from __future__ import annotations

from time import perf_counter


class OwnTime:
    """One rank's clock. The host's: of an accelerator it has what the host waits for, not what the device does.

    Attributes:
        is_wanted: Whether there is another rank to compare with; without one nobody need tell it of windows.
        seconds: Of own work, in all windows.
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
