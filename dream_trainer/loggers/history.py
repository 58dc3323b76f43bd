"""The lines of a run as data, newest last, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

Line = dict[str, float]


class History(Sequence[Line]):
    """The last lines that were logged; a sequence that grows.

    Args:
        limit: Most lines to keep; None keeps all. A line of ten metrics takes about 1 KB.

    Attributes:
        dropped: How many older lines are no longer here. metrics.jsonl has them.
    """

    def __init__(self, limit: int | None) -> None:
        self._lines: deque[Line] = deque(maxlen=limit)
        self.dropped = 0

    def append(self, line: Line) -> None:
        """Adds the newest line."""
        self.dropped += len(self._lines) == self._lines.maxlen
        self._lines.append(line)

    def replace(self, lines: Iterable[Line]) -> None:
        """Has these lines and no others."""
        self._lines.clear()
        self.dropped = 0
        for line in lines:
            self.append(line)

    @overload
    def __getitem__(self, index: int) -> Line: ...
    @overload
    def __getitem__(self, index: slice) -> list[Line]: ...
    def __getitem__(self, index: int | slice) -> Line | list[Line]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self._lines))
            return list(islice(self._lines, start, stop, step)) if step > 0 else list(self._lines)[index]
        return self._lines[index]

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def __reversed__(self) -> Iterator[Line]:
        return reversed(self._lines)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        older = f" after {self.dropped} older ones" if self.dropped else ""
        return f"History of {len(self)} lines{older}"
