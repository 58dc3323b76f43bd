"""StoreStream: an object read as a file, ahead of the reader where that goes straight on."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dream_trainer.stores.object_store import ObjectStore

_FIRST = 1 << 16  # bytes; a jump costs no more than this
_PART = 8 << 20
_PARTS_AT_ONCE = 4


class StoreStream(io.RawIOBase):
    """An object's content. Whoever jumps gets little more than asked for; whoever reads on gets ever larger
    parts, up to 32 MiB in several requests at once, so that a store far away is no slower than its line.

    Args:
        store: Where.
        key: Which object.
        size: Its bytes.

    Attributes:
        size: Its bytes.
        fetched: Bytes that came from the store.
    """

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self.size = size
        self.fetched = 0
        self._position = 0
        self._start = 0  # of what is in memory
        self._memory = memoryview(b"")
        self._ahead = _FIRST

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves; nothing is fetched."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Reads into `buffer` what it holds, or what is left.

        Raises:
            OSError: The store refused, or did not answer.
        """
        target = memoryview(buffer).cast("B")
        wanted = min(len(target), max(0, self.size - self._position))
        filled = 0
        while filled < wanted:
            inside = self._position - self._start
            if not 0 <= inside < len(self._memory):
                self._fetch(wanted - filled)
                inside = 0
            part = self._memory[inside : inside + wanted - filled]
            target[filled : filled + len(part)] = part
            filled += len(part)
            self._position += len(part)
        return filled

    def _fetch(self, wanted: int) -> None:
        goes_on = self._position == self._start + len(self._memory)
        self._ahead = min(2 * self._ahead, _PARTS_AT_ONCE * _PART) if goes_on else _FIRST
        count = min(max(self._ahead, wanted), _PARTS_AT_ONCE * _PART)
        end = min(self.size, self._position + count)
        cuts = [*range(self._position, end, _PART), end]
        parts = self._store.read_ranges(self._key, list(pairwise(cuts)))
        if sum(map(len, parts)) != end - self._position:
            raise ConnectionError(f"{self._key}: the store sent {sum(map(len, parts))} bytes of {end - self._position}")
        self._start, self._memory = self._position, memoryview(b"".join(parts))
        self.fetched += len(self._memory)
