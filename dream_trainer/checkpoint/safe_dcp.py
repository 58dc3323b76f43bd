"""Reading DCP's files without running anybody's code.

`.metadata` is unpickled by a reader that knows a short list of record types. A shard with anything but tensors is not
opened, and PyTorch reads tensors with `weights_only=True`."""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from xxhash import xxh3_128

from dream_trainer.checkpoint.files import compare_content, unreadable
from dream_trainer.checkpoint.manifest import Manifest, read_manifest
from dream_trainer.compat.pytorch import dcp_metadata_globals, local_tensor
from dream_trainer.errors import CheckpointError, DamagedCheckpointError

METADATA_NAME = ".metadata"

_DTYPE_NAMES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's metadata records and nothing else."""

    def __init__(self, content: bytes, file: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._file = file
        not_a_tensor = (BytesStorageMetadata.__module__, BytesStorageMetadata.__name__)  # an empty record
        self._allowed = dcp_metadata_globals() | {not_a_tensor}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in self._allowed or (module_name == "torch" and global_name in _DTYPE_NAMES):
            return super().find_class(module_name, global_name)
        raise DamagedCheckpointError(
            f"{self._file} asks for {module_name}.{global_name}, which no checkpoint's metadata needs; loading it "
            "could run someone else's code. Do not use this checkpoint."
        )


def parse_metadata(content: bytes, file: Path, *, has_others: bool = False) -> Metadata:
    """DCP's metadata; with `has_others` entries may be no tensors."""
    try:
        metadata = MetadataUnpickler(content, file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in many ways
        raise DamagedCheckpointError(f"{file} is damaged: {type(error).__name__}: {error}.") from error
    records, places = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(records, dict) or not isinstance(places, dict):
        raise DamagedCheckpointError(f"{file} contains no DCP metadata. Resume from another checkpoint.")
    for name, record in records.items():
        if not isinstance(name, str) or not (has_others or isinstance(record, TensorStorageMetadata)):
            raise DamagedCheckpointError(
                f"{file} lists {name!r}, which is not a tensor. Only tensors are read from DCP files."
            )
    return metadata


def read_metadata(path: Path) -> tuple[Manifest, Metadata]:
    manifest = read_manifest(path)
    return manifest, parse_metadata(manifest.read(METADATA_NAME), manifest.path / METADATA_NAME)


class SafeReader(FileSystemReader):
    """A DCP reader that opens the manifest's files and no others, and names the one that it could not read."""

    def __init__(self, manifest: Manifest, metadata: Metadata) -> None:
        super().__init__(manifest.path)
        self._manifest = manifest
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._location(item.storage_index).relative_path, []).append(item)
        for name, items in by_file.items():
            self._manifest.entry(name)
            self._read_file(name, replace(plan, items=items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, name: str, plan: LoadPlan, planner: LoadPlanner) -> None:
        file = self._manifest.path / name
        try:
            super().read_data(plan, planner).wait()
        except CheckpointError:
            raise
        except OSError as error:
            raise unreadable(file, error) from error
        except pickle.UnpicklingError as error:
            raise DamagedCheckpointError(f"{file} cannot be read: {error}. Do not use this checkpoint.") from error
        except Exception as error:  # PyTorch's reader fails in many ways on what is not an archive of a tensor
            raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error

    def _location(self, index: MetadataIndex) -> Any:
        if index not in self.storage_data:
            raise DamagedCheckpointError(
                f"{self._manifest.path / METADATA_NAME} does not say where {index.fqn!r} is. It is damaged."
            )
        return self.storage_data[index]


def read_tensors(manifest: Manifest, metadata: Metadata, tensors: Mapping[str, Tensor], reader: SafeReader) -> None:
    """Fills `tensors` in place from a checkpoint's shards; no communication."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    # DCP leaves alone what no shard covers, as happens with one host's part of a checkpoint on another layout
    covered = Counter[str]()
    for item in plan.items:
        covered[item.dest_index.fqn] += prod(item.lengths)
    for name, tensor in tensors.items():
        if covered[name] != local_tensor(tensor).numel():
            raise CheckpointError(
                f"{manifest.path} has {covered[name]} of the {local_tensor(tensor).numel()} elements of {name} that "
                "this rank needs. It was written on another layout of ranks."
            )
    reader.read_data(plan, planner).wait()


def read_and_verify(
    manifest: Manifest, metadata: Metadata, tensors: Mapping[str, Tensor], shards: Sequence[str]
) -> None:
    """Like `read_tensors`, and hashes `shards` in a thread. A wrong checksum takes precedence over PyTorch's errors."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums") as thread:
        verified = [thread.submit(manifest.verify, name) for name in shards]
        try:
            read_tensors(manifest, metadata, tensors, SafeReader(manifest, metadata))
        finally:
            for future in verified:
                future.result()


# -- Reading tensors from an object store: each rank fetches the parts that it needs, and no byte twice.


_PART = 32 << 20


def read_from_store(
    manifest: Manifest, metadata: Metadata, tensors: Mapping[str, Tensor], shards: Sequence[str]
) -> None:
    """Like `read_and_verify`. Fetches shards that this rank verifies whole, once, and only needed parts of others."""
    files = _HashedFiles(manifest, shards)
    try:
        read_tensors(manifest, metadata, tensors, _StoreReader(manifest, metadata, files))
    finally:  # a wrong checksum replaces PyTorch's error about damaged bytes
        for name in files.unread():
            manifest.verify(name)


class _StoreReader(SafeReader):
    """Reads each file from its beginning to its end."""

    def __init__(self, manifest: Manifest, metadata: Metadata, files: _HashedFiles) -> None:
        super().__init__(manifest, metadata)
        self.fs = files

    def _read_file(self, name: str, plan: LoadPlan, planner: LoadPlanner) -> None:
        ordered = sorted(plan.items, key=lambda item: int(self._location(item.storage_index).offset))
        super()._read_file(name, replace(plan, items=ordered), planner)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        return io.BytesIO(cast(_Forward, file).part(sinfo.offset, sinfo.length))


class _Forward:
    """A file read in order; skipped parts are only fetched if the whole is hashed."""

    def __init__(self, stream: io.RawIOBase, *, hashes: bool) -> None:
        self._stream = stream
        self._digest = xxh3_128() if hashes else None
        self._position = 0
        self._last = (-1, b"")

    def part(self, offset: int, length: int) -> bytes:
        """Bytes from `offset`, which is that of the last part, or behind it."""
        if self._last[0] != offset:
            self._skip_to(offset)
            self._last = offset, self._read(length)
        return self._last[1]

    def finish(self) -> tuple[int, str] | None:
        """Size and checksum of the whole, if it is hashed."""
        if self._digest is None:
            return None
        self._skip_to(None)
        return self._position, self._digest.hexdigest()

    def _skip_to(self, offset: int | None) -> None:
        if self._digest is None:
            self._stream.seek(offset or 0)
            return
        while offset is None or self._position < offset:
            if not self._read(_PART if offset is None else min(_PART, offset - self._position)):
                return

    def _read(self, length: int) -> bytes:
        content = self._stream.read(length) or b""
        self._position += len(content)
        if self._digest is not None:
            self._digest.update(content)
        return content


class _HashedFiles(FileSystem):
    """The files of a checkpoint; those in `shards` are compared with their checksums once they were read."""

    def __init__(self, manifest: Manifest, shards: Sequence[str]) -> None:
        super().__init__()
        self._manifest = manifest
        self._to_verify = dict.fromkeys(shards)

    def unread(self) -> list[str]:
        """The shards to verify that were not read to their end."""
        return list(self._to_verify)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        path = cast(Path, path)
        with path.open("rb") as stream:
            file = _Forward(cast(io.RawIOBase, stream), hashes=path.name in self._to_verify)
            yield file
            found = file.finish()
        if found is not None:
            entry = self._manifest.entry(path.name)
            del self._to_verify[path.name]
            compare_content(path, found, (entry.size, entry.xxh3))
