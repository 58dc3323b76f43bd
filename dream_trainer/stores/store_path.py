"""StorePath: a path in an object store that reads like one of a disk. A directory exists while objects' keys begin with
it; writes are refused, except `rename` and removal of a directory, which begin and end with its manifest."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PosixPath
from typing import Any, NoReturn, Self

from dream_trainer.errors import ConfigError
from dream_trainer.stores.object_store import SCHEMES, ObjectStore, StoredEntry, open_store

_ADDRESS = re.compile(rf"({'|'.join(SCHEMES)})://?([^/]+)(/.*)?")


def as_path(path: str | Path) -> Path:
    """`path` as a path of this machine, or of an object store if it begins with one's scheme."""
    if isinstance(path, StorePath) or not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        return Path(path) if isinstance(path, str) else path
    text = str(path)
    match = _ADDRESS.fullmatch(text)
    if match is None:
        kinds = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(
            f"{text.partition(':')[0]}: is no place that is read or written. Use a directory, or {kinds}."
        )
    if re.search(r"[@?#]", text):
        raise ConfigError(
            f"an address of {match[1]}:// has credentials or a query in it, which would be written down with the "
            f"config. Use {match[1]}://bucket/path; credentials come from the environment."
        )
    return StorePath(text)


def absolute(path: Path) -> Path:
    return path if isinstance(path, StorePath) else Path(os.path.abspath(path))


class StorePath(PosixPath):
    """A path in an object store, made by `as_path`; keeps nothing between calls but what `iterdir` saw."""

    _seen: StoredEntry | None = None

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in an object store, and is no path of the file system.")

    @property
    def store(self) -> ObjectStore:
        return open_store(self.parts[0].rstrip(":"))

    @property
    def key(self) -> str:
        """The bucket and the path in it, as `ObjectStore` names objects."""
        return "/".join(self.parts[1:])

    # -- read

    def iterdir(self) -> Iterator[StorePath]:  # type: ignore[override]
        for entry in self.store.entries(self.key):
            child = self / entry.name
            child._seen = entry
            yield child

    def is_dir(self, **kwargs: Any) -> bool:
        return self._seen.is_directory if self._seen else bool(self.store.entries(self.key))

    def is_file(self, **kwargs: Any) -> bool:
        return self.store.size(self.key) is not None

    def exists(self, **kwargs: Any) -> bool:
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def stat(self, **kwargs: Any) -> os.stat_result:
        """Its size; all else is 0."""
        size = self._seen.size if self._seen else self.store.size(self.key)
        if size is None:
            raise FileNotFoundError(f"{self} is not there")
        return os.stat_result((0, 0, 0, 0, 0, 0, size, 0, 0, 0))

    def read_bytes(self) -> bytes:
        return self.store.read(self.key)

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """The object as a file that is read; with mode "rb" alone."""
        if mode != "rb":
            self._refuse()
        return StoreStream(self.store, self.key, self.stat().st_size)

    def _itself(self, *args: Any, **kwargs: Any) -> Self:
        return self

    resolve = absolute = expanduser = _itself

    # -- change

    def rename(self, target: str | os.PathLike[str]) -> StorePath:
        """Copies a directory's objects below `target`, the manifest last, then removes them here."""
        assert isinstance(target, StorePath)
        names = removal_order(self)
        for name in reversed(names):
            self.store.copy((self / name).key, (target / name).key)
        for name in names:
            self.store.remove((self / name).key)
        return target

    def mkdir(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: a directory is there with its first object."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise io.UnsupportedOperation(f"{self} is in an object store, which does not support this")

    touch = unlink = rmdir = replace = symlink_to = hardlink_to = chmod = write_bytes = write_text = glob = _refuse


def removal_order(directory: StorePath) -> list[str]:
    """The names of a directory's objects, that of a manifest first: without it the others do not count."""
    names = sorted(entry.name for entry in directory.store.entries(directory.key) if not entry.is_directory)
    return sorted(names, key=lambda name: name != "manifest.json")


_FIRST = 1 << 16  # bytes; a jump costs no more than this
_PART = 8 << 20
_PARTS_AT_ONCE = 4


class StoreStream(io.RawIOBase):
    """An object's content: jumps fetch little; reading on fetches up to 32 MiB in several requests at once."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        super().__init__()
        self._store, self._key = store, key
        self.size, self.fetched, self._position = size, 0, 0
        self._start, self._memory, self._ahead = 0, memoryview(b""), _FIRST  # what is in memory, from where

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
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
