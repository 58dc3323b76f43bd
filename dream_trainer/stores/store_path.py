"""StorePath: a path in an object store that is read as one of a disk, so that what reads checkpoints need not know.

A directory is what several objects' keys begin with: it is there while one of them is, and nobody makes it. What would
write as on a disk is refused, but for `rename` and `discard` of a directory, which are not atomic: they begin and end
with the file whose presence makes the directory count.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any, NoReturn

from dream_trainer.errors import ConfigError
from dream_trainer.stores.object_store import SCHEMES, ObjectStore, StoredEntry, open_store
from dream_trainer.stores.store_stream import StoreStream

_ADDRESS = re.compile(rf"({'|'.join(SCHEMES)})://?([^/]+)(/.*)?")


def as_path(path: str | Path) -> Path:
    """`path` as a path of this machine, or of an object store if that is how it begins.

    Raises:
        ConfigError: It is the address of something else, such as `https://...`, or has credentials in it.
    """
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
    """`path` from the root of the file system, links as they are; one in a store is that already."""
    return path if isinstance(path, StorePath) else Path(os.path.abspath(path))


class StorePath(PosixPath):
    """A path in an object store, such as `s3://bucket/runs/step_00001000`; `as_path` makes it from a text.

    What reads raises OSError, as on a disk. Nothing is kept from one call to the next, but for what `iterdir` saw.
    """

    _seen: StoredEntry | None = None

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in an object store, and is no path of the file system.")

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    @property
    def store(self) -> ObjectStore:
        """The store it is in."""
        return open_store(self.parts[0].rstrip(":"))

    @property
    def key(self) -> str:
        """The bucket and the path in it, as `ObjectStore` names objects."""
        return "/".join(self.parts[1:])

    def __truediv__(self, name: str | os.PathLike[str]) -> StorePath:
        return super().__truediv__(name)

    @property
    def parent(self) -> StorePath:
        """The directory that it is in."""
        return super().parent

    # -- read

    def iterdir(self) -> Iterator[StorePath]:  # type: ignore[override]
        """The directory's entries."""
        for entry in self.store.entries(self.key):
            child = self / entry.name
            child._seen = entry
            yield child

    def is_dir(self, **kwargs: Any) -> bool:
        """Whether there are objects below it."""
        return self._seen.is_directory if self._seen else bool(self.store.entries(self.key))

    def is_file(self, **kwargs: Any) -> bool:
        """Whether there is such an object."""
        return self.store.size(self.key) is not None

    def exists(self, **kwargs: Any) -> bool:
        """Whether there is such an object, or one below it."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def stat(self, **kwargs: Any) -> os.stat_result:
        """Its size; all else is 0.

        Raises:
            FileNotFoundError: There is no such object.
        """
        size = self._seen.size if self._seen else self.store.size(self.key)
        if size is None:
            raise FileNotFoundError(f"{self} is not there")
        return os.stat_result((0, 0, 0, 0, 0, 0, size, 0, 0, 0))

    def read_bytes(self) -> bytes:
        """The object's content."""
        return self.store.read(self.key)

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """The object as a file that is read; with mode "rb" alone.

        Raises:
            FileNotFoundError: There is no such object.
        """
        if mode != "rb":
            self._refuse()
        return StoreStream(self.store, self.key, self.stat().st_size)

    def resolve(self, strict: bool = False) -> StorePath:
        """Itself."""
        return self

    def absolute(self) -> StorePath:
        """Itself."""
        return self

    def expanduser(self) -> StorePath:
        """Itself."""
        return self

    # -- change

    def rename(self, target: str | os.PathLike[str]) -> StorePath:
        """Moves a directory's objects below `target`, inside the store: copies all, then removes them here.

        The objects are taken in the reverse of `removal_order`, so that the first is the last to be there.
        """
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
        raise io.UnsupportedOperation(f"{self} is in an object store, where this cannot be done")

    touch = unlink = rmdir = replace = symlink_to = hardlink_to = chmod = write_bytes = write_text = glob = _refuse


def removal_order(directory: StorePath) -> list[str]:
    """The names of a directory's objects, that of a manifest first: without it the others do not count."""
    names = sorted(entry.name for entry in directory.store.entries(directory.key) if not entry.is_directory)
    return sorted(names, key=lambda name: name != "manifest.json")


def remove_directory(directory: StorePath) -> None:
    """Removes a directory's objects, the manifest first."""
    for name in removal_order(directory):
        directory.store.remove((directory / name).key)
