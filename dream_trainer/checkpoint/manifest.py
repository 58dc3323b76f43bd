"""The manifest: the file that makes a directory a checkpoint, and what it says about the directory's other files.

It is written last, lists every file with size and checksum, and carries a checksum of itself. A directory without a
valid manifest does not exist for the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.files import (
    compare_sizes,
    content_checksum,
    named_step,
    read_file,
    step_directories,
    unreadable,
    verify_file,
)
from dream_trainer.distributed.outcomes import on_all_ranks
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.stores.store_path import StorePath

SCHEMA_VERSION = 1
"""Incremented with every change that an older reader would misread."""

MANIFEST_NAME = "manifest.json"

SHARD_ENDING = ".distcp"
"""Of the files in which DCP keeps tensors."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint, as it was written."""

    size: int
    """Bytes."""
    xxh3: str
    """xxh3 of the content, 128 bit, hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint contains and where it comes from."""

    path: Path
    """The checkpoint's directory; not stored, so that a checkpoint may be moved."""
    step: int
    """Optimizer steps completed (`global_step`)."""
    epoch: int
    """Epoch in which it was written, 0-based."""
    samples_seen: int
    """Samples consumed by all ranks since the run began."""
    world_size: int
    """Number of ranks that wrote it; each has rank files of its own."""
    mesh_shape: dict[str, int]
    """Size of each dimension of the device mesh at that time."""
    config: dict[str, Any]
    """The run's config as plain values."""
    metrics: dict[str, Any]
    """Metrics at that step; NaN and missing ones are allowed."""
    versions: dict[str, str]
    """Of torch and dream_trainer."""
    wall_time: float
    """Seconds since 1970, UTC, when it was written."""
    files: dict[str, FileEntry]
    """Every file but the manifest itself."""
    parent: dict[str, Any] | None = None
    """Of a branch: the `checkpoint` it began from, whose `run` and `step`, and the `words`. Not stored if None."""
    schema_version: int = SCHEMA_VERSION
    """Version of the directory's layout."""

    @property
    def shards(self) -> list[str]:
        """The files that contain tensors, by rank and number."""
        return sorted((name for name in self.files if name.endswith(SHARD_ENDING)), key=lambda name: (len(name), name))

    def entry(self, name: str) -> FileEntry:
        """The entry of the file `name`.

        Raises:
            DamagedCheckpointError: The checkpoint has no such file.
        """
        if name not in self.files:
            raise DamagedCheckpointError(f"{self.path} has no file {name!r}. Resume from another checkpoint.")
        return self.files[name]

    def read(self, name: str) -> bytes:
        """Content of the file `name`, its checksum verified.

        Raises:
            DamagedCheckpointError: The file is missing or damaged.
        """
        entry = self.entry(name)
        return read_file(self.path / name, entry.size, entry.xxh3)

    def facts(self) -> dict[str, Any]:
        """What it says in short, of which JSON can be made."""
        names = ("epoch", "samples_seen", "world_size", "mesh_shape", "metrics", "versions", "wall_time")
        return {name: vars(self)[name] for name in names}

    def verify(self, name: str) -> None:
        """Reads the complete file `name` and compares its checksum.

        Raises:
            DamagedCheckpointError: The file is missing or damaged.
        """
        entry = self.entry(name)
        verify_file(self.path / name, entry.size, entry.xxh3)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's content on disk, with its own checksum as the last field."""
    body = {name: value for name, value in vars(manifest).items() if name != "path"}
    if manifest.parent is None:
        del body["parent"]  # readers of before branches had words know no such field
    body["files"] = {name: vars(entry) for name, entry in sorted(manifest.files.items())}
    return _sealed(body)


def manifest_digest(manifest: Manifest) -> str:
    """Which checkpoint this is, of all that were ever written: the checksum of its manifest."""
    return content_checksum(encode_manifest(manifest))


def _sealed(body: dict[str, Any]) -> bytes:
    """The text of a manifest with these fields: there is only one, so that its checksum can be compared."""
    text = typed_json.dumps(body, name="manifest")
    return typed_json.dumps({**body, "xxh3": content_checksum(text.encode())}).encode()


def read_manifest(path: Path) -> Manifest:
    """Reads a checkpoint's manifest and compares the sizes of its files; contents are not read.

    Raises:
        DamagedCheckpointError: The manifest is missing, empty, damaged or belongs to another step, or a file is missing
            or has another size. The message names the file and the fault.
        CheckpointError: There is no such directory, or its schema is newer than this reader.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory. Give the path of a checkpoint, such as .../step_00001000.")
    manifest = _parse(path, _body(path / MANIFEST_NAME))
    if named_step(path) not in (None, manifest.step):
        raise DamagedCheckpointError(
            f"{path / MANIFEST_NAME} is of step {manifest.step}, which is not the directory's. "
            "Give the directory its original name back."
        )
    compare_sizes(path, {name: entry.size for name, entry in manifest.files.items()})
    return manifest


def _body(file: Path) -> dict[str, Any]:
    """The parsed manifest, its schema version and checksum verified."""
    advice = "Resume from another checkpoint."
    try:
        text = file.read_bytes()
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{file} is missing, so {file.parent} is not a checkpoint. {advice}") from error
    except OSError as error:
        raise unreadable(file, error) from error
    if not text:
        raise DamagedCheckpointError(f"{file} is empty. {advice}")
    try:
        # The version is read as plain JSON: a newer schema may use types that this reader does not know.
        plain = json.loads(text)
        version = plain.get("schema_version") if isinstance(plain, dict) else None
        if type(version) is not int:
            raise ValueError("it has no schema version")
        if version > SCHEMA_VERSION:
            raise CheckpointError(
                f"{file} has schema version {version}, and this dream_trainer reads up to {SCHEMA_VERSION}. "
                "Update dream_trainer."
            )
        body: dict[str, Any] = typed_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{file} is damaged: {error}. {advice}") from error
    body.pop("xxh3", None)
    if _sealed(body) != text:
        raise DamagedCheckpointError(f"{file} is damaged: its own checksum does not match. {advice}")
    return body


def _parse(path: Path, body: dict[str, Any]) -> Manifest:
    expected = {field.name for field in fields(Manifest)} - {"path"}
    try:
        if set(body) | {"parent"} != expected:
            raise ValueError(f"its fields are not those of schema {SCHEMA_VERSION}: {sorted(set(body) ^ expected)}")
        files = {_plain_name(name): FileEntry(**entry) for name, entry in body["files"].items()}
        return Manifest(**{**body, "path": path, "files": files})
    except (TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{path / MANIFEST_NAME} is damaged: {error}. Resume from another checkpoint."
        ) from error


def _plain_name(name: str) -> str:
    # A manifest may come from a stranger: it must not lead a reader out of its directory.
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a file of its directory")
    return name


def list_checkpoints(root: Path) -> list[Manifest]:
    """The checkpoints under `root` by step: those with a valid manifest whose files have the sizes it lists.

    Temporary, incomplete and damaged directories are left out. Contents are not read; `verify_checkpoint` does that.
    """
    manifests = []
    for _, path in step_directories(root):
        try:
            manifests.append(read_manifest(path))
        except CheckpointError:
            continue
    return manifests


def newest_checkpoint(root: Path) -> Manifest | None:
    """The last one of `list_checkpoints`; older ones are not looked at."""
    for _, path in reversed(step_directories(root)):
        try:
            return read_manifest(path)
        except CheckpointError:
            continue
    return None


def finished_directories(root: Path) -> list[Path]:
    """The directories that are checkpoints, or were; in a store, where they are written in place, by their manifest."""
    paths = [path for _, path in step_directories(root)]
    return [path for path in paths if not isinstance(path, StorePath) or (path / MANIFEST_NAME).is_file()]


def faults(path: Path) -> list[str]:
    """Reads a checkpoint through; returns an error for each file that is not as it was written."""
    found = []
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    for name in sorted(manifest.files):
        try:
            manifest.verify(name)
        except CheckpointError as error:
            found.append(str(error))
    return found


def verify_checkpoint(path: Path, *, world: Ranks) -> Manifest:
    """Reads every file of a checkpoint and compares its checksum; its readers divide the files among them.

    Raises:
        DamagedCheckpointError: Something is missing or damaged, the same on all ranks.
        CheckpointError: There is no such checkpoint, or its schema is newer than this reader.
    """
    return _verify(path, world, lambda manifest: sorted(manifest.files))


def verify_all_but_shards(path: Path, *, world: Ranks) -> Manifest:
    """As `verify_checkpoint`, but of the shards, which are most of the bytes, only the sizes are compared.

    Their checksums are compared by `load_tensors` while it reads them.
    """
    return _verify(path, world, lambda manifest: sorted(set(manifest.files) - set(manifest.shards)))


def own_share(names: list[str], path: Path, world: Ranks) -> list[str]:
    """Which of a directory's files this rank reads, where all that read the same one divide them; a collective."""
    paths = world.all_gather_object(str(path))
    readers = [rank for rank, other in enumerate(paths) if other == str(path)]
    return names[readers.index(world.rank) :: len(readers)]


def _verify(path: Path, world: Ranks, names: Callable[[Manifest], list[str]]) -> Manifest:
    manifest = on_all_ranks(world, f"verify {path}", lambda: read_manifest(path))
    own = own_share(names(manifest), path, world)

    def verify() -> Manifest:
        for name in own:
            manifest.verify(name)
        return manifest

    return on_all_ranks(world, f"verify {path}", verify)
