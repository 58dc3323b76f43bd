"""An object store's bytes through fsspec: the few operations that checkpoints need. An object appears whole or not at
all. Credentials come from where each store's own tools take them, and are taken out of what errors say."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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


class StoredEntry(NamedTuple):
    name: str  # the last part of its path
    size: int  # bytes; 0 for a directory
    is_directory: bool


class ObjectStore:
    """One store's objects by their keys. Raises FileNotFoundError, PermissionError or ConnectionError."""

    def __init__(self, scheme: str) -> None:
        try:
            import fsspec

            # What another job wrote must be seen: listings are not kept.
            options = dict(_OPTIONS.get(scheme, {}))
            if scheme == "gs":
                import aiohttp  # which gcsfs brings; it would wait five minutes for each of six tries

                options = {"requests_timeout": aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)}
            self._files: Any = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)
        except ImportError as error:
            raise ConfigError(
                f"{scheme}:// needs the package {SCHEMES[scheme]}. Run pip install {SCHEMES[scheme]}."
            ) from error
        self._scheme = scheme
        log = logging.getLogger(SCHEMES[scheme])
        if log.level == logging.NOTSET:  # it logs tracebacks of what it raises, secrets included
            log.setLevel(logging.CRITICAL)

    def create(self, key: str, content: bytes) -> bool:
        """Writes an object unless it exists, and returns whether it did; after an error it may exist all the same."""
        with self._speaking_of(key):
            try:
                self._files.pipe_file(key, content, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # s3fs knows a condition that did not hold by a field that not every server's answer has.
                if error.errno == errno.EINVAL and _asked(lambda: self._files.exists(key)):
                    return False
                raise
        return True

    def write(self, key: str, content: bytes) -> None:
        with self._speaking_of(key):
            self._files.pipe_file(key, content)

    def send(self, file: Path, key: str) -> None:
        """Copies a local file to an object; a large one in parts, several at once."""
        with file.open("rb"):  # a file that is gone here is no fault of the store
            pass
        with self._speaking_of(key):
            self._files.put_file(str(file), key, **_SENDING.get(self._scheme, {}))

    def read(self, key: str) -> bytes:
        with self._speaking_of(key):
            content: bytes = _asked(lambda: self._files.cat_file(key))
        return content

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of an object, all at once: each from its first byte to before its last."""
        with self._speaking_of(key):
            starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
            parts: list[bytes] = _asked(
                lambda: self._files.cat_ranges([key] * len(ranges), starts, ends, on_error="raise")
            )
        return parts

    def size(self, key: str) -> int | None:
        try:
            with self._speaking_of(key):
                found = _asked(lambda: self._files.info(key))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def entries(self, key: str) -> list[StoredEntry]:
        """Entries of a directory; empty if there is none."""
        try:
            with self._speaking_of(key):
                found = _asked(lambda: self._files.ls(key, detail=True))
        except FileNotFoundError:
            return []
        named = [(entry["name"].rstrip("/"), entry) for entry in found]
        return [
            StoredEntry(name.rpartition("/")[2], int(entry["size"] or 0), entry["type"] == "directory")
            for name, entry in named
            if name != key.rstrip("/")
        ]

    def copy(self, source: str, target: str) -> None:
        with self._speaking_of(source):
            _asked(lambda: self._files.cp_file(source, target))

    def remove(self, key: str) -> None:
        try:
            with self._speaking_of(key):
                self._files.rm_file(key)
        except FileNotFoundError:
            pass

    @contextmanager
    def _speaking_of(self, key: str) -> Iterator[None]:
        """Makes every error one of four kinds, without what came with it, which may hold secrets."""
        address = f"{self._scheme}://{key}"
        try:
            yield
            return
        except FileNotFoundError:
            raised: OSError = FileNotFoundError(f"{address} is not there")
        except PermissionError as error:
            raised = PermissionError(f"{address}: {without_secrets(error)}. Are the credentials those of this store?")
        except Exception as error:  # each store's client has its own errors
            raised = ConnectionError(f"{address}: {without_secrets(error)}")
        raise raised from None


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


open_store = cache(ObjectStore)  # by scheme, with the credentials and the endpoint that the environment names


def without_secrets(error: BaseException) -> str:
    """An exception's message in a line, without credentials from the environment and from addresses."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    secrets = [value for name, value in os.environ.items() if _SECRET_VARIABLE.match(name) and len(value) > 3]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _USER_OF_URL.sub("***@", _SECRET_ARGUMENT.sub(r"\1=***", text))
