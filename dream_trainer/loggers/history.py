"""The lines of a run as data, newest last, in bounded memory: a list, as `json.dumps` and pandas take it."""

from __future__ import annotations

from collections.abc import Iterable

Line = dict[str, float]


class History(list[Line]):
    """The last lines that were logged.

    Args:
        limit: Most lines to keep; None keeps all. A line of ten metrics takes about 1 KB.

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
