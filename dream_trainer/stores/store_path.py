"""An object store's bytes through fsspec, the few operations that checkpoints need; and StorePath: a path in one that
reads like one of a disk.

An object appears whole or not at all. Credentials come from where each store's own tools take them, and are taken out
of what errors say. A directory exists while objects' keys begin with it; writes are refused, except `rename` and
removal of a directory, which begin and end with its manifest."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path, PosixPath
from typing import Any, NoReturn, Self, TypeVar

from xxhash import xxh3_128

from dream_trainer.errors import ConfigError

T = TypeVar("T")

# what an object store's address begins with, and the package that speaks to it
SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}

# Otherwise an unanswered connection would be retried for minutes before the run gets an error.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}},
    "az": {"connection_timeout": 10, "read_timeout": 60},
}
_SENDING: dict[str, dict[str, Any]] = {"s3": {"chunksize": 16 << 20}}  # ten are sent at a time
# An answer to HEAD has no body that could say that requests are to come slower, so no client tries it often enough.
_WAITS_WHILE_BUSY = (0.1, 0.4, 1.6)  # seconds
_SECRET_VARIABLE = re.compile(r"(AWS|AZURE|GOOGLE|GCS|FSSPEC)_\w*(KEY|SECRET|TOKEN|SAS|PASSWORD|CONNECTION|CREDENTIAL)")
_SECRET_ARGUMENT = re.compile(
    r"(?i)\b(sig|signature|x-amz-\w[\w-]*|x-goog-\w[\w-]*|awsaccesskeyid|accountkey|sharedaccesssignature)=[^&;\s'\"]+"
)
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+@")


@cache
def open_store(scheme: str) -> Any:
    """fsspec's file system, with the credentials and the endpoint that the environment names."""
    try:
        import fsspec

        # What another job wrote must be seen: listings are not kept.
        options = dict(_OPTIONS.get(scheme, {}))
        if scheme == "gs":
            import aiohttp  # which gcsfs brings; it would wait five minutes for each of six tries

            options = {"requests_timeout": aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)}
        files = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs the package {SCHEMES[scheme]}. Run pip install {SCHEMES[scheme]}."
        ) from error
    log = logging.getLogger(SCHEMES[scheme])
    if log.level == logging.NOTSET:  # it logs tracebacks of what it raises, secrets included
        log.setLevel(logging.CRITICAL)
    return files


def _asked(ask: Callable[[], T]) -> T:
    """What the store answers, asked again while it is busy; for requests that may come twice."""
    for seconds in _WAITS_WHILE_BUSY:
        try:
            return ask()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        time.sleep(seconds)
    return ask()


def without_secrets(error: BaseException) -> str:
    """An exception's message in a line, without credentials from the environment and from addresses."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    secrets = [value for name, value in os.environ.items() if _SECRET_VARIABLE.match(name) and len(value) > 3]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _USER_OF_URL.sub("***@", _SECRET_ARGUMENT.sub(r"\1=***", text))


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
    """A path in an object store, made by `as_path`; keeps nothing between calls but what `iterdir` saw.

    Raises FileNotFoundError, PermissionError or ConnectionError."""

    _seen: tuple[int, bool] | None = None  # bytes, 0 for a directory; whether it is one

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in an object store, and is no path of the file system.")

    @property
    def key(self) -> str:
        """The bucket and the path in it, as fsspec names objects."""
        return "/".join(self.parts[1:])

    @contextmanager
    def _files(self) -> Iterator[Any]:
        """fsspec's file system; every error is made one of the three kinds, without secrets that came with it."""
        try:
            files = open_store(self.parts[0].rstrip(":"))
        except FileNotFoundError as error:  # of credentials, not of the object
            raise ConnectionError(f"{self}: {without_secrets(error)}") from None
        try:
            yield files
            return
        except FileNotFoundError:
            raised: OSError = FileNotFoundError(f"{self} is not there")
        except PermissionError as error:
            raised = PermissionError(f"{self}: {without_secrets(error)}. Are the credentials those of this store?")
        except Exception as error:  # each store's client has its own errors
            raised = ConnectionError(f"{self}: {without_secrets(error)}")
        raise raised from None

    # -- read

    def iterdir(self) -> Iterator[StorePath]:  # type: ignore[override]
        """Entries of a directory; none if there is no such directory."""
        found: list[Any] = []
        with suppress(FileNotFoundError), self._files() as files:
            found = _asked(lambda: files.ls(self.key, detail=True))
        for entry in found:
            name = entry["name"].rstrip("/")
            if name != self.key:
                child = self / name.rpartition("/")[2]
                child._seen = int(entry["size"] or 0), entry["type"] == "directory"
                yield child

    def size(self) -> int | None:
        """Bytes of an object; None if there is none."""
        with suppress(FileNotFoundError), self._files() as files:
            found = _asked(lambda: files.info(self.key))
            return int(found["size"]) if found["type"] == "file" else None
        return None

    def is_dir(self, **kwargs: Any) -> bool:
        return self._seen[1] if self._seen else any(True for _ in self.iterdir())

    def is_file(self, **kwargs: Any) -> bool:
        return self.size() is not None

    def exists(self, **kwargs: Any) -> bool:
        return self.is_file() or self.is_dir()

    def stat(self, **kwargs: Any) -> os.stat_result:
        """Its size; all else is 0."""
        size = self._seen[0] if self._seen else self.size()
        if size is None:
            raise FileNotFoundError(f"{self} is not there")
        return os.stat_result((0, 0, 0, 0, 0, 0, size, 0, 0, 0))

    def read_bytes(self) -> bytes:
        with self._files() as files:
            content: bytes = _asked(lambda: files.cat_file(self.key))
        return content

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of an object, all at once: each from its first byte to before its last."""
        keys, starts, ends = [self.key] * len(ranges), [start for start, _ in ranges], [end for _, end in ranges]
        with self._files() as files:
            parts: list[bytes] = _asked(lambda: files.cat_ranges(keys, starts, ends, on_error="raise"))
        return parts

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """The object as a file that is read on; with mode "rb" alone."""
        if mode != "rb":
            self._refuse()
        return self.read_on(0, self.stat().st_size)

    def read_on(self, start: int, stop: int) -> io.BufferedReader:
        return io.BufferedReader(StoreStream(self, start, stop), _PARTS_AT_ONCE * _PART)

    def _itself(self, *args: Any, **kwargs: Any) -> Self:
        return self

    resolve = absolute = expanduser = _itself

    # -- change

    def create(self, content: bytes) -> bool:
        """Writes an object unless it exists, and returns whether it did; after an error it may exist all the same."""
        with self._files() as files:
            try:
                files.pipe_file(self.key, content, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # s3fs knows a condition that did not hold by a field that not every server's answer has.
                if error.errno == errno.EINVAL and _asked(lambda: files.exists(self.key)):
                    return False
                raise
        return True

    def put(self, content: bytes) -> None:
        with self._files() as files:
            files.pipe_file(self.key, content)

    def upload(self, file: Path) -> None:
        """Copies a local file to this object; a large one in parts, several at once."""
        with file.open("rb"):  # a file that is gone here is no fault of the store
            pass
        with self._files() as files:
            files.put_file(str(file), self.key, **_SENDING.get(self.parts[0].rstrip(":"), {}))

    def remove(self) -> None:
        with suppress(FileNotFoundError), self._files() as files:
            files.rm_file(self.key)

    def rename(self, target: str | os.PathLike[str]) -> StorePath:
        """Copies a directory's objects below `target`, the manifest last, then removes them here."""
        assert isinstance(target, StorePath)
        objects = removal_order(self)
        for entry in reversed(objects):
            with entry._files() as files:
                _asked(partial(files.cp_file, entry.key, (target / entry.name).key))
        for entry in objects:
            entry.remove()
        return target

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise io.UnsupportedOperation(f"{self} is in an object store, which does not support this")

    touch = unlink = rmdir = replace = symlink_to = hardlink_to = chmod = write_bytes = write_text = glob = _refuse


def removal_order(directory: StorePath) -> list[StorePath]:
    """The objects of a directory, the manifest first: without it the others do not count."""
    objects = [entry for entry in directory.iterdir() if not entry.is_dir()]
    return sorted(objects, key=lambda entry: (entry.name != "manifest.json", entry.name))


_PART = 8 << 20
_PARTS_AT_ONCE = 4


class StoreStream(io.RawIOBase):
    """An object's content, or a range of it, hashed on the way; a read asks for several parts at once."""

    def __init__(self, place: StorePath, start: int, stop: int) -> None:
        super().__init__()
        self._place, self._position, self._stop = place, start, stop
        self.digest = xxh3_128()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        asked = min(len(buffer), _PARTS_AT_ONCE * _PART, self._stop - self._position)
        if asked <= 0:
            return 0
        end = self._position + asked
        parts = self._place.read_ranges(list(pairwise([*range(self._position, end, _PART), end])))
        content = b"".join(parts)
        if len(content) != asked:
            raise ConnectionError(f"{self._place.key}: the store sent {len(content)} bytes of {asked}")
        self.digest.update(content)
        buffer[:asked] = content
        self._position = end
        return asked

    def tell(self) -> int:
        return self._position
