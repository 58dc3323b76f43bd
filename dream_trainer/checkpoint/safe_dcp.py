"""Reading DCP's files without running anybody's code.

`.metadata` is unpickled by a reader that knows a short list of record types. A shard with anything but tensors is not
opened, and PyTorch reads tensors with `weights_only=True`."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dream_trainer.checkpoint.blocks import Box, inside, load_pickle, part_of
from dream_trainer.checkpoint.files import FileEntry, blaming
from dream_trainer.checkpoint.manifest import Manifest, read_manifest
from dream_trainer.compat.pytorch import dcp_metadata_globals, file_window, local_tensor
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.stores.store_path import StorePath

METADATA_NAME = ".metadata"


class MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's metadata records and nothing else."""

    def __init__(self, content: bytes, file: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._file = file
        not_a_tensor = (BytesStorageMetadata.__module__, BytesStorageMetadata.__name__)  # an empty record
        self._allowed = dcp_metadata_globals() | {not_a_tensor}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype)
        if is_dtype or (module_name, global_name) in self._allowed:
            return super().find_class(module_name, global_name)
        raise DamagedCheckpointError(
            f"{self._file} asks for {module_name}.{global_name}, which no checkpoint's metadata needs; loading it "
            "could run someone else's code. Do not use this checkpoint."
        )


def parse_metadata(content: bytes, file: Path, *, has_others: bool = False) -> Metadata:
    """DCP's metadata; with `has_others` entries may be no tensors."""
    with blaming(file):
        metadata: Metadata = MetadataUnpickler(content, file).load()
        for name, record in metadata.state_dict_metadata.items():
            if not isinstance(name, str) or not (has_others or isinstance(record, TensorStorageMetadata)):
                raise DamagedCheckpointError(
                    f"{file} lists {name!r}, which is not a tensor. Only tensors are read from DCP files."
                )
    return metadata


def read_metadata(path: Path) -> tuple[Manifest, Metadata]:
    manifest = read_manifest(path)
    return manifest, parse_metadata(manifest.read(METADATA_NAME), manifest.path / METADATA_NAME)


# -- Blocks of tensors, assembled from the saved chunks that they overlap.


class _Piece(NamedTuple):
    """What a block has of a saved chunk."""

    file: Path
    offset: int  # of the chunk in the file, as an archive of its own
    length: int
    name: str  # of the tensor, for errors
    chunk: ChunkStorageMetadata
    common: Box  # in the full tensor's coordinates

    def copy(self, saved: IO[bytes], block: Tensor, box: Box) -> None:
        """Copies it from the chunk's archive into `block`, which lies at `box` of the tensor."""
        chunk = load_pickle(saved, self.file, mmap=False)
        if not isinstance(chunk, Tensor) or chunk.shape != self.chunk.sizes:
            raise DamagedCheckpointError(f"{self.file} contains something else where {self.name!r} should be.")
        source = chunk[_shifted(self.common, self.chunk.offsets)]
        block[_shifted(self.common, [cut.start for cut in box])].copy_(source)


class DcpTensors:
    """Tensors of a DCP directory, of any program; `names` maps their new names to those in the metadata."""

    def __init__(
        self, path: Path, metadata: Metadata, manifest: Manifest | None, names: Mapping[str, str] | None = None
    ) -> None:
        self._path, self._manifest = path, manifest
        records: dict[str, Any] = metadata.state_dict_metadata
        self._storage: Any = metadata.storage_data
        self._names = {name: name for name in records} if names is None else names
        with blaming(path / METADATA_NAME):
            self.records: dict[str, TensorStorageMetadata] = {name: records[full] for name, full in self._names.items()}
            self.shapes = {name: tuple(record.size) for name, record in self.records.items()}

    def checksums(self, boxes: Mapping[str, Box]) -> dict[Path, FileEntry]:
        if self._manifest is None:
            return {}
        pieces = (piece for name, box in boxes.items() for piece in self.pieces(name, box))
        return {piece.file: self._manifest.entry(piece.file.name) for piece in pieces}

    def pieces(self, name: str, box: Box) -> list[_Piece]:
        found, metadata_file = [], self._path / METADATA_NAME
        with blaming(metadata_file):
            for chunk in self.records[name].chunks:
                common = tuple(
                    slice(max(cut.start, offset), min(cut.stop, offset + size))
                    for cut, offset, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
                )
                if any(cut.start >= cut.stop for cut in common):
                    continue
                place = self._storage[MetadataIndex(self._names[name], chunk.offsets)]
                if place.transform_descriptors:
                    raise CheckpointError(
                        f"{metadata_file} names stream transforms for {name!r}, which are not applied."
                    )
                if self._manifest is not None:
                    self._manifest.entry(place.relative_path)
                file = inside(metadata_file, place.relative_path)
                found.append(_Piece(file, place.offset, place.length, name, chunk, common))
        covered, wanted = sum(_volume(piece.common) for piece in found), _volume(box)
        if covered < wanted:
            raise CheckpointError(
                f"{self._path} has {covered} of the {wanted} elements of {name} that this rank needs. Was a rank's "
                "file left out, or was it written on another layout of ranks?"
            )
        return found

    def read(self, name: str, box: Box) -> Tensor:
        block = torch.empty([cut.stop - cut.start for cut in box], dtype=self.records[name].properties.dtype)
        for piece in self.pieces(name, box):
            with blaming(piece.file), piece.file.open("rb") as stream:
                piece.copy(_window(piece.file, stream, piece.offset, piece.length), block, box)
        return block


def _window(file: Path, stream: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """A part of an open file; of an object, whose reader jumps, in memory."""
    if isinstance(file, StorePath):
        return io.BytesIO(file.read_on(offset, offset + length).read(length))
    return file_window(stream, offset, length)


def _volume(box: Box) -> int:
    return math.prod(cut.stop - cut.start for cut in box)


def _shifted(box: Box, origin: Any) -> Box:
    return tuple(slice(cut.start - at, cut.stop - at) for cut, at in zip(box, origin, strict=True))


@torch.no_grad()
def read_tensors(
    manifest: Manifest, metadata: Metadata, tensors: Mapping[str, Tensor], shards: Collection[str]
) -> None:
    """Fills `tensors` in place; no communication. Each file is read from its beginning to its end, and hashed after:
    other checksums than those of `shards` take precedence over PyTorch's errors about damaged bytes."""
    stored = DcpTensors(manifest.path, metadata, manifest)
    unread = set(shards)
    try:
        by_file: dict[Path, list[tuple[_Piece, Tensor, Box]]] = {}
        for name, tensor in tensors.items():
            local, part = local_tensor(tensor), part_of(tensor)
            if part.rows:
                local.copy_(part.of(stored.read(name, part.box)))
                continue
            for piece in stored.pieces(name, part.box) if local.numel() else ():
                by_file.setdefault(piece.file, []).append((piece, local, part.box))
        for file, parts in by_file.items():
            with blaming(file), file.open("rb") as stream:
                # The memory of the host still has a local file's content: hashing it on the way would copy that twice.
                is_hashed = file.name in unread and isinstance(file, StorePath)
                for piece, local, box in sorted(parts, key=lambda of: of[0].offset):
                    if is_hashed:
                        _skip(stream, piece.offset - stream.tell())
                        piece.copy(io.BytesIO(stream.read(piece.length)), local, box)
                    else:
                        piece.copy(_window(file, stream, piece.offset, piece.length), local, box)
                if is_hashed:
                    _skip(stream, math.inf)
                    unread.remove(file.name)
                    raw: Any = stream.raw
                    manifest.entry(file.name).compare(file, raw.tell(), raw.digest.hexdigest())
    finally:
        manifest.verify(*sorted(unread))


_PART = 32 << 20


def _skip(stream: IO[bytes], count: float) -> None:
    """Reads on by `count` bytes, or to the end."""
    while count > 0 and (content := stream.read(int(min(count, _PART)))):
        count -= len(content)
