"""MediaQueue: images and other media between the moment when they are logged and that when loggers get them.

They wait for their window, or their validation, to be through: so they have the step of its numbers, and a window that
runs again writes them once. Loggers get them after all numbers of earlier steps: W&B takes steps in their order alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from dream_trainer.loggers.interface import Stamp
from dream_trainer.loggers.media import Media


class MediaQueue:
    """What rank 0 is still to write.

    Attributes:
        waiting: What training logged, with the step where that is known already; looked at after each window.
        before_window: How many of them were logged before the running window.
    """

    __slots__ = ("_of_validation", "before_window", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Media, Stamp | None]] = []
        self.before_window = 0
        self._of_validation: list[tuple[str, Media]] = []

    def __iter__(self) -> Iterator[tuple[str, Media, Stamp | None]]:
        return iter(self.waiting)

    def add(self, name: str, item: Media, stamp: Stamp | None) -> None:
        """Takes what training logs; without a stamp it gets that of the running window."""
        self.waiting.append((name, item, stamp))

    def add_in_validation(self, name: str, item: Media) -> None:
        """Takes what the running validation logs."""
        self._of_validation.append((name, item))

    def window_dropped(self) -> None:
        """Forgets what was logged since `before_window` was set."""
        del self.waiting[self.before_window :]

    def validation_started(self) -> None:
        """Forgets what an earlier validation logged that nobody asked for: `evaluate` and `predict` write nothing."""
        self._of_validation.clear()

    def validated(self, stamp: Stamp) -> None:
        """The running validation counts, and gets this stamp."""
        self.waiting += [(name, item, stamp) for name, item in self._of_validation]
        self._of_validation.clear()

    def clear(self) -> None:
        """Forgets what training logged."""
        self.waiting.clear()
