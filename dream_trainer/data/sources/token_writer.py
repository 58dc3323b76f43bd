"""Writes documents of token ids into the files that token_file.py reads; a shard is there whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from dream_trainer import file_locks
from dream_trainer.data.sources.token_file import FORMAT, VERSION
from dream_trainer.errors import DataError


class TokenFileWriter:
    """Writes one shard; use it with `with`, in one process at a time. What was written is seen only when that ends
    without an exception.

    Args:
        path: The shard's .bin file; its directory is created.
        vocabulary_size: Number of token ids. Up to 65,536 take two bytes each, more take four.
        facts: What else the header is to say, as plain data.

    Attributes:
        num_tokens: Tokens written so far.
        num_documents: Documents written so far.
    """

    def __init__(self, path: str | Path, vocabulary_size: int, facts: dict[str, Any] | None = None) -> None:
        if not 1 <= vocabulary_size <= 2**32:
            raise DataError(
                f"vocabulary_size={vocabulary_size} is not from 1 to 2**32: token ids take up to four bytes."
            )
        self.path = Path(path)
        if self.path.suffix != ".bin":
            raise DataError(f"a token file is named NAME.bin, not {self.path.name}.")
        self.vocabulary_size = vocabulary_size
        self.dtype = np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")
        self.num_tokens = 0
        self._facts = facts or {}
        self._starts = [0]

    @property
    def num_documents(self) -> int:
        return len(self._starts) - 1

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _part(self.path).open("ab")
        if not _locked(self._file, _part(self.path)):
            self._file.close()
            raise DataError(f"{self.path} is being written by another process. Wait for it, or end it.")
        self._file.truncate(0)  # what one that was killed has left
        return self

    def add(self, tokens: npt.ArrayLike) -> None:
        """Writes one document.

        Args:
            tokens: Token ids, shape `(tokens,)`; may be none.

        Raises:
            DataError: They are not integers from 0 to `vocabulary_size - 1` in one dimension.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise DataError(f"document {self.num_documents} has {ids.dtype} of shape {ids.shape}, no token ids.")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary_size:
            raise DataError(
                f"document {self.num_documents} has token ids from {ids.min()} to {ids.max()}, and "
                f"vocabulary_size={self.vocabulary_size}."
            )
        self._file.write(ids.astype(self.dtype).tobytes())
        self.num_tokens += len(ids)
        self._starts.append(self.num_tokens)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            _part(self.path).unlink()
            self._file.close()
            return
        self._file.flush()
        header = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "vocabulary_size": self.vocabulary_size,
        }
        index, described = self.path.with_suffix(".index.npy"), self.path.with_suffix(".json")
        with _part(index).open("wb") as file:
            np.save(file, np.array(self._starts, dtype=np.int64))
        _part(described).write_text(json.dumps(header | self._facts, indent=1) + "\n")
        described.unlink(missing_ok=True)  # of a shard that was here before
        for path in (self.path, index, described):  # the header last: it says that all are there
            _flush(_part(path))
            os.replace(_part(path), path)
        self._file.close()


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _locked(file: BinaryIO, path: Path) -> bool:
    """Whether the file is this process's alone, and still at its path: another one may have ended just now."""
    is_held = file_locks.take(file)
    if is_held is None:
        file_locks.warn_of_no_locks(path.parent)
    try:
        return is_held is not False and os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
