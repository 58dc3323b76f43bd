"""The file-system operations that a checkpoint is made of, all in one place and all flushed to the disk.

A rename is only as durable as what it renames: files are fsynced before it, their directory too, and the parent
directory after it. Whoever brings another kind of storage replaces this file.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from dream_trainer.errors import CheckpointError

_CHUNK = 8 << 20
_STEP_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY_NAME = re.compile(r"\.step_\d{8,}\.tmp-[0-9a-f]{16}")


def step_name(step: int) -> str:
    """The directory name of a step's checkpoint, such as `step_00001000`."""
    return f"step_{step:08d}"


def named_step(path: Path) -> int | None:
    """The step that a checkpoint directory's name states; None if it is named otherwise."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def step_directories(root: Path) -> list[tuple[int, Path]]:
    """The directories under `root` that are named as checkpoints, by step; none if `root` does not exist."""
    if not root.is_dir():
        return []
    named = ((named_step(entry), entry) for entry in root.iterdir() if entry.is_dir())
    return sorted((step, entry) for step, entry in named if step is not None)


def set_newer_aside(root: Path, step: int) -> list[Path]:
    """Renames the checkpoints under `root` after `step`, so that none of them is resumed; returns their new paths."""
    moved = []
    for newer, path in step_directories(root):
        if newer > step:
            aside = path.with_name(f".aside-{secrets.token_hex(4)}-{path.name}")
            path.rename(aside)
            moved.append(aside)
    if moved:
        sync_directory(root)
    return moved


def write_file(path: Path, content: bytes) -> None:
    """Writes a new file and waits until the disk has it.

    Raises:
        OSError: The file exists already, or cannot be written.
    """
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Waits until the disk has the directory's entries: new, renamed and removed names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> tuple[int, str]:
    """Size in bytes and xxh3 (128 bit, hexadecimal) of a file, read in chunks of 8 MiB."""
    from xxhash import xxh3_128

    digest, size = xxh3_128(), 0
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return size, digest.hexdigest()


def content_checksum(content: bytes) -> str:
    """xxh3 (128 bit, hexadecimal) of bytes in memory."""
    from xxhash import xxh3_128

    return xxh3_128(content).hexdigest()


def make_temporary(root: Path, step: int) -> Path:
    """Creates the hidden directory in which a step's checkpoint is written before it is published."""
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f".{step_name(step)}.tmp-{secrets.token_hex(8)}"
    temporary.mkdir()
    return temporary


def remove_temporaries(root: Path) -> list[Path]:
    """Removes the temporary directories that killed jobs left under `root`, and nothing that is named otherwise."""
    left = [entry for entry in root.iterdir() if _TEMPORARY_NAME.fullmatch(entry.name)] if root.is_dir() else []
    for entry in left:
        remove_tree(entry)
    return left


def remove_tree(path: Path) -> None:
    """Removes a directory as far as the file system lets it; what stays is tried again at the next save."""
    shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, final: Path) -> None:
    """Makes a complete temporary directory visible as `final`, by one atomic rename.

    A damaged directory that holds the name is moved aside first, under a temporary's name, and removed afterwards.

    Raises:
        OSError: The file system refused.
    """
    sync_directory(temporary)
    if final.exists():
        aside = final.with_name(f".{final.name}.tmp-{secrets.token_hex(8)}")
        final.rename(aside)
        temporary.rename(final)
        remove_tree(aside)
    else:
        temporary.rename(final)
    sync_directory(final.parent)


def read_file(path: Path, size: int, xxh3: str) -> bytes:
    """A small file's content, once it is known to be what was written.

    Raises:
        CheckpointError: The file is missing, or its size or checksum is another.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Resume from another checkpoint.") from error
    _compare(path, (len(content), content_checksum(content)), (size, xxh3))
    return content


def verify_file(path: Path, size: int, xxh3: str) -> None:
    """Reads a file through and compares it with what was written.

    Raises:
        CheckpointError: The file is missing, or its size or checksum is another.
    """
    try:
        found = checksum(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Resume from another checkpoint.") from error
    _compare(path, found, (size, xxh3))


def _compare(path: Path, found: tuple[int, str], written: tuple[int, str]) -> None:
    if found[0] != written[0]:
        raise CheckpointError(
            f"{path} has {found[0]} bytes where {written[0]} were written. Resume from another checkpoint."
        )
    if found[1] != written[1]:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {found[1]}, {written[1]} was written. Resume from another checkpoint."
        )
