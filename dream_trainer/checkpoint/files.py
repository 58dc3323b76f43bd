"""The file-system operations that a checkpoint is made of, all flushed to the disk.

Files are fsynced before a rename, their directory too, and the parent directory after it."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from xxhash import xxh3_128

from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.stores.store_path import StorePath, removal_order

_STEP_NAME = re.compile(r"step_(\d{8,})")
TEMPORARY_NAME = re.compile(r"\.step_(\d{8,})\.tmp-[0-9a-f]+")
REPLACED_NAME = re.compile(r"\.step_(\d{8,})\.replaced-[0-9a-f]+")
ASIDE_NAME = re.compile(r"\.aside-[0-9a-f]+-step_(\d{8,})")
SHARED_NAME = "shared.json"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint, as it was written."""

    size: int  # bytes
    xxh3: str  # xxh3 of the content, 128 bit, hexadecimal

    def compare(self, path: Path, size: int, xxh3: str | None = None) -> None:
        """Raises DamagedCheckpointError if a file has another size, or another checksum, if that is known."""
        if size != self.size:
            raise DamagedCheckpointError(
                f"{path} has {size} bytes where {self.size} were written. Resume from another checkpoint."
            )
        if xxh3 not in (None, self.xxh3):
            raise DamagedCheckpointError(
                f"{path} is damaged: its checksum is {xxh3}, {self.xxh3} was written. Resume from another checkpoint."
            )

    def verify(self, path: Path) -> None:
        """Reads a complete file and compares it."""
        with blaming(path):
            self.compare(path, *checksum(path))


def step_name(step: int) -> str:
    """The directory name of a step's checkpoint, such as `step_00001000`."""
    return f"step_{step:08d}"


def rank_name(rank: int) -> str:
    return f"rank_{rank:05d}"


def named_step(path: Path) -> int | None:
    """The step in the name of a checkpoint directory; None for other names."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def within(directory: Path) -> list[Path]:
    """Its entries; empty if there is no such directory."""
    return list(directory.iterdir()) if directory.is_dir() else []


def step_directories(root: Path) -> list[tuple[int, Path]]:
    """The directories under `root` with checkpoint names, by step; none if `root` does not exist."""
    named = ((named_step(entry), entry) for entry in within(root) if entry.is_dir())
    return sorted((step, entry) for step, entry in named if step is not None)


def set_newer_aside(root: Path, step: int) -> list[Path]:
    """Renames the checkpoints under `root` after `step`, so that none of them is resumed; returns their new paths."""
    moved = [set_aside(path) for newer, path in step_directories(root) if newer > step]
    if moved:
        sync_directory(root)
    return moved


def set_aside(path: Path) -> Path:
    """Renames a checkpoint, so that it is not resumed; returns its new path."""
    aside = path.with_name(f".aside-{secrets.token_hex(4)}-{path.name}")
    path.rename(aside)
    return aside


class NewFile(io.BufferedWriter):
    """A new file that is written once, hashed (xxh3, 128 bit) and counted on the way, and on the disk once closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self.digest = xxh3_128()
        self.size = 0

    def write(self, content: Any, /) -> int:
        count = super().write(content)
        self.digest.update(content)
        self.size += count
        return count

    @property
    def entry(self) -> FileEntry:
        return FileEntry(size=self.size, xxh3=self.digest.hexdigest())

    def seek(self, *args: Any) -> NoReturn:
        raise io.UnsupportedOperation("a file that is hashed while it is written cannot be rewound or cut")

    truncate = seek

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()


def write_file(path: Path, content: bytes) -> FileEntry:
    with NewFile(path) as file:
        file.write(content)
    return file.entry


def sync_directory(path: Path) -> None:
    """Waits until the disk has the directory's entries: new, renamed and removed names."""
    if isinstance(path, StorePath):  # writes there are durable already
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> tuple[int, str]:
    """Size in bytes and xxh3 (128 bit, hexadecimal) of a file."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxh3_128)
        return file.tell(), digest.hexdigest()


def content_checksum(content: bytes) -> str:
    return xxh3_128(content).hexdigest()


def make_temporary(root: Path, step: int) -> Path:
    """Creates the hidden directory where a step's checkpoint is written before it is published."""
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f".{step_name(step)}.tmp-{secrets.token_hex(8)}"
    temporary.mkdir()
    return temporary


def remove_tree(path: Path) -> None:
    """Removes a directory as far as the file system allows; the next save tries the rest again."""
    shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Deletes a checkpoint: first its name, by one atomic rename, then its files; in a store, its manifest first."""
    named = _STEP_NAME.search(path.name)
    if named is None:
        raise ValueError(f"{path} is not named as a checkpoint. Remove it by hand.")
    if isinstance(path, StorePath):
        for entry in removal_order(path):
            entry.remove()
        return
    hidden = path.with_name(f".{named[0]}.tmp-{secrets.token_hex(8)}")
    path.rename(hidden)
    sync_directory(path.parent)
    remove_tree(hidden)


def publish(temporary: Path, final: Path, remove: Callable[[Path], None] = discard) -> None:
    """Makes a complete temporary directory visible as `final`, which it replaces, by one atomic rename."""
    sync_directory(temporary)
    if not final.exists():
        temporary.rename(final)
        sync_directory(final.parent)
        return
    aside = final.with_name(f".{final.name}.replaced-{secrets.token_hex(8)}")
    final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        aside.rename(final)
        raise
    sync_directory(final.parent)
    remove(aside)


def recover_replaced(root: Path) -> None:
    """Gives checkpoints back their names that a killed job had set aside to replace."""
    for entry in within(root):
        if replaced := REPLACED_NAME.fullmatch(entry.name):
            final = root / step_name(int(replaced[1]))
            if final.exists():
                discard(entry)
            else:
                entry.rename(final)
                sync_directory(root)


@contextmanager
def blaming(file: Path) -> Iterator[None]:
    """Inside, every exception becomes an error that names `file`; a time-out or a closed directory is no damage."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        if isinstance(error, FileNotFoundError | IsADirectoryError) or error.errno == errno.EIO:
            raise DamagedCheckpointError(f"{file} {why}. Resume from another checkpoint.") from error
        raise CheckpointError(f"{file} {why}. Correct that, or resume from another checkpoint.") from error
    except Exception as error:  # a damaged file can fail in many ways
        raise DamagedCheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def compare_sizes(directory: Path, files: Mapping[str, FileEntry]) -> None:
    """Compares the sizes of files with what was written, without reading them."""
    # In a store one listing says it of all.
    seen = {path.name: path for path in directory.iterdir()} if isinstance(directory, StorePath) else {}
    for name, entry in files.items():
        path = seen.get(name, directory / name)
        with blaming(path):
            entry.compare(path, path.stat().st_size)
