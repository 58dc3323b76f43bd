"""Shared parts of all readers of weight files."""

from __future__ import annotations

import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from dream_trainer.checkpoint.manifest import FileEntry
from dream_trainer.errors import CheckpointError, ConfigError, DamagedCheckpointError

Box = tuple[slice, ...]  # a block of a tensor: one slice per dimension, with start and stop


class WeightFiles(ABC):
    """Named tensors on disk, with the full shape of each."""

    shapes: Mapping[str, tuple[int, ...]]

    def checksums(self, boxes: Mapping[str, Box]) -> dict[Path, FileEntry]:
        """The files that contain these blocks, with size and checksum, if those are known."""
        return {}

    @abstractmethod
    def read(self, name: str, box: Box) -> Tensor:
        """A block of a tensor, on the CPU, in the file's dtype. It may be a view of the file: not to be written to."""


def renamer(renames: Mapping[str, str] | None) -> Callable[[Iterable[str]], dict[str, str]]:
    """Makes a function from names to a dict of new to given names, which replaces the expressions in order.

    A name that becomes empty is left out."""
    patterns = []
    for pattern, replacement in (renames or {}).items():
        try:
            compiled = re.compile(pattern)
            compiled.sub(replacement, "")  # a faulty replacement fails here, matched or not
        except (re.error, IndexError) as error:
            raise ConfigError(
                f"renames={{{pattern!r}: {replacement!r}}} is not a regular expression and its replacement: {error}. "
                'Write a dot of a name as r"\\.".'
            ) from error
        patterns.append((compiled, replacement))

    def renamed(names: Iterable[str]) -> dict[str, str]:
        sources: dict[str, str] = {}
        for name in names:
            new = name
            for pattern, replacement in patterns:
                new = pattern.sub(replacement, new)
            if new in sources:
                raise CheckpointError(
                    f"the renames make {new!r} of both {sources[new]!r} and {name!r}. Make them differ."
                )
            if new:
                sources[new] = name
        return sources

    return renamed


def inside(file: Path, name: str) -> Path:
    """The path of `name` in the directory of the `file` that refers to it, which may be untrusted."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DamagedCheckpointError(f"{file} refers to {name!r}, outside its directory. Do not use it.")
    return file.parent / name


@contextmanager
def blaming(file: Path) -> Iterator[None]:
    """Inside, every exception becomes an error that names `file`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can fail in many ways
        raise DamagedCheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def load_pickle(source: Path | IO[bytes], file: Path, *, mmap: bool) -> Any:
    """The result of `torch.load` on a file or a part of it, on the CPU, without running its code."""
    with blaming(file):
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            # PyTorch's own message is not shown: it proposes to run the code.
            asked = re.search(r"GLOBAL (\S+)", str(error))
            raise DamagedCheckpointError(
                f"{file} asks for {asked[1] if asked else 'something'}, which weights do not need; loading it could "
                "run someone else's code. If you trust its author, save the bare state dict from it and load that."
            ) from error
