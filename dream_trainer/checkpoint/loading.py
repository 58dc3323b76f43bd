"""Reading a checkpoint back: its tensors into those of any mesh, and the states of all ranks or of one."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.files import SHARED_NAME, compare_content, rank_name
from dream_trainer.checkpoint.manifest import Manifest, own_share, read_manifest
from dream_trainer.checkpoint.safe_dcp import SafeReader, read_tensors
from dream_trainer.distributed.outcomes import from_all_ranks, on_all_ranks
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.stores.store_path import StorePath


def tensor_metadata(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Global shape and dtype of each tensor in a checkpoint, by name.

    Raises:
        DamagedCheckpointError: The manifest or DCP's metadata is missing, damaged or asks for code.
    """
    _, metadata = _open(path)
    return {name: _kind(record) for name, record in metadata.state_dict_metadata.items()}


def _kind(record: Any) -> tuple[torch.Size, torch.dtype]:
    return record.size, record.properties.dtype


def _open(path: Path) -> tuple[Manifest, Metadata]:
    from dream_trainer.checkpoint.safe_dcp import METADATA_NAME, parse_metadata

    manifest = read_manifest(path)
    return manifest, parse_metadata(manifest.read(METADATA_NAME), manifest.path / METADATA_NAME)


def load_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, world: Ranks, optional_prefix: str | tuple[str, ...] = ()
) -> None:
    """Fills tensors in place, whatever mesh and world size they were saved from. Every rank calls this.

    Names, shapes and dtypes are compared on all ranks before anything is written. Each rank reads the shard files that
    its own shards overlap. In addition one of the ranks hashes each complete shard file.

    Of a local checkpoint each host has its own part, which has to cover the shards of its ranks.

    Args:
        tensors: Where to load to, by name: DTensors of any layout, or plain. Together the ranks must have every name of
            the checkpoint and no other.

    Raises:
        DamagedCheckpointError: A file is missing, damaged or asks for code; the same on every rank. If it is a shard,
            the tensors' values are undefined: load another checkpoint into them, or stop.
        CheckpointError: Names are missing on either side, or shapes or dtypes differ (none is cast), listed by name;
            the same on every rank, and nothing was written.
    """
    from dream_trainer.checkpoint.safe_dcp import read_and_verify

    task = f"load {path}"
    manifest, metadata = on_all_ranks(world, task, lambda: _open(path))
    unused = from_all_ranks(world, task, lambda: _compare(metadata, tensors))
    # Under a pipeline no rank has all names: only what no rank asks for is left over.
    left_over = {name for name in set.intersection(*unused) if not name.startswith(optional_prefix)}
    if left_over:
        raise CheckpointError(
            f"Could not {task}: it contains {_listed(left_over)}, which this run does not have. "
            "Was a layer or an optimizer removed, renamed or frozen since?"
        )
    shards = own_share(manifest.shards, manifest.path, world)
    read = read_from_store if isinstance(manifest.path, StorePath) else read_and_verify
    on_all_ranks(world, task, lambda: read(manifest, metadata, tensors, shards))


def _compare(metadata: Metadata, tensors: Mapping[str, Tensor]) -> set[str]:
    """Compares what was saved with the tensors to load it into; returns the saved names that are not among them."""
    records = metadata.state_dict_metadata
    missing = set(tensors) - set(records)
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {_listed(missing)}. Was a layer or an optimizer added, renamed or unfrozen since?"
        )
    different = []
    for name, tensor in tensors.items():
        shape, dtype = _kind(records[name])
        if shape != tensor.shape or dtype != tensor.dtype:
            different.append(f"{name} (saved {tuple(shape)} {dtype}, here {tuple(tensor.shape)} {tensor.dtype})")
    if different:
        raise CheckpointError(f"shapes or dtypes differ: {_listed(different)}. Nothing is cast or cut to fit.")
    return set(records) - set(tensors)


def _listed(names: Iterable[str], limit: int = 20) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + rest


def read_shared(path: Path) -> dict[str, Any]:
    """The state that was the same on all ranks.

    Raises:
        DamagedCheckpointError: The manifest or the file is missing or damaged.
    """
    return _read_json(read_manifest(path), SHARED_NAME)


def read_rank(path: Path, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state that only rank `rank` had: its JSON state and its tensors, on the CPU.

    Raises:
        DamagedCheckpointError: The manifest or a file is missing or damaged.
        CheckpointError: Fewer ranks wrote the checkpoint.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    manifest = read_manifest(path)
    if not 0 <= rank < manifest.world_size:
        raise CheckpointError(
            f"{path} was written by {manifest.world_size} ranks and has no state of rank {rank}. "
            "Reseed what belongs to a rank when the layout changed."
        )
    state = _read_json(manifest, f"{rank_name(rank)}.json")
    name = f"{rank_name(rank)}.safetensors"
    try:
        return state, load(manifest.read(name))
    except (SafetensorError, KeyError) as error:
        raise DamagedCheckpointError(f"{manifest.path / name} is not a safetensors file: {error}.") from error


def _read_json(manifest: Manifest, name: str) -> dict[str, Any]:
    content = manifest.read(name)
    try:
        state = typed_json.loads(content)
        if not isinstance(state, dict):
            raise ValueError(f"it contains an object of type {type(state).__name__} where a dict was written")
    except ValueError as error:
        raise DamagedCheckpointError(f"{manifest.path / name} is damaged: {error}.") from error
    return state


_PART = 32 << 20


def read_from_store(
    manifest: Manifest, metadata: Metadata, tensors: Mapping[str, Tensor], shards: Sequence[str]
) -> None:
    """As `read_and_verify`. Of a shard that this rank verifies all is fetched, once; of another what it needs.

    Raises:
        DamagedCheckpointError: A shard is missing, damaged or asks for code. The tensors' values are undefined then.
        CheckpointError: The store did not answer, or a shard cannot be read.
    """
    files = _HashedFiles(manifest, shards)
    try:
        read_tensors(manifest, metadata, tensors, _StoreReader(manifest, metadata, files))
    finally:  # what PyTorch says of damaged bytes is not said if the checksum finds them
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
    """A file read in order; what is passed over is fetched only where the whole is hashed."""

    def __init__(self, stream: io.RawIOBase, *, hashes: bool) -> None:
        from xxhash import xxh3_128

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
        """Size and checksum of the whole, where it is hashed."""
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
        """The shards to verify of which nobody read anything, or not to the end."""
        return list(self._to_verify)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """A file for DCP to read from."""
        path = cast(Path, path)
        with path.open("rb") as stream:
            file = _Forward(cast(io.RawIOBase, stream), hashes=path.name in self._to_verify)
            yield file
            found = file.finish()
        if found is not None:
            entry = self._manifest.entry(path.name)
            del self._to_verify[path.name]
            compare_content(path, found, (entry.size, entry.xxh3))
