"""MediaQueue: images and other media between the moment when they are logged and that when loggers get them.

They wait for their window, or their validation, to be through: so they have the step of its numbers, and a window that
runs again writes them once. Loggers get them after all numbers of earlier steps: W&B takes steps in their order alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from dream_trainer.loggers.interface import Stamp
from dream_trainer.loggers.media import Media


class MediaQueue:
    """What rank 0 is still to write."""

    __slots__ = ("_before_window", "_of_validation", "_waiting")

    def __init__(self) -> None:
        # With the step, where that is known already.
        self._waiting: list[tuple[str, Media, Stamp | None]] = []
        self._before_window = 0  # how many of them were logged before the running window
        self._of_validation: list[tuple[str, Media]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[tuple[str, Media, Stamp | None]]:
        return iter(self._waiting)

    def add(self, name: str, item: Media, stamp: Stamp | None) -> None:
        """Takes what training logs; without a stamp it gets that of the running window."""
        self._waiting.append((name, item, stamp))

    def add_in_validation(self, name: str, item: Media) -> None:
        """Takes what the running validation logs."""
        self._of_validation.append((name, item))

    def window_started(self) -> None:
        """What comes from here on belongs to the next window."""
        self._before_window = len(self._waiting)

    def window_dropped(self) -> None:
        """Forgets what was logged since `window_started`."""
        del self._waiting[self._before_window :]

    def validation_started(self) -> None:
        """Forgets what an earlier validation logged that nobody asked for: `evaluate` and `predict` write nothing."""
        self._of_validation.clear()

    def validated(self, stamp: Stamp) -> None:
        """The running validation counts, and gets this stamp."""
        self._waiting += [(name, item, stamp) for name, item in self._of_validation]
        self._of_validation.clear()

    def clear(self) -> None:
        """Forgets what training logged."""
        self._waiting.clear()
