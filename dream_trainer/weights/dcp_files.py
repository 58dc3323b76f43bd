"""Weights in DCP directories: Dream Trainer's own checkpoints, and other programs' directories.

A block is assembled from the saved chunks that it overlaps. Entries that are not tensors are never read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dream_trainer.checkpoint.manifest import FileEntry, Manifest
from dream_trainer.checkpoint.safe_dcp import METADATA_NAME, parse_metadata, read_metadata
from dream_trainer.compat.pytorch import file_window
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.weights.export_files import TensorSpec
from dream_trainer.weights.reading import Box, WeightFiles, blaming, inside, load_pickle

_OWN_PREFIX = "models."


def open_checkpoint(path: Path, model_name: str | None) -> DcpFiles:
    """The weights of one model in a Dream Trainer checkpoint; the model's name may be None if there is only one."""
    manifest, metadata = read_metadata(path)
    names = [name for name in metadata.state_dict_metadata if name.startswith(_OWN_PREFIX)]
    models = sorted({name.split(".")[1] for name in names})
    if model_name is None and len(models) != 1:
        raise CheckpointError(f"{path} holds the models {models}. Say which with model_name.")
    prefix = f"{_OWN_PREFIX}{model_name or models[0]}."
    chosen = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    if not chosen:
        raise CheckpointError(f"{path} holds no model {model_name!r}; it holds {models}. Give one as model_name.")
    return DcpFiles(path, metadata, chosen, manifest)


def open_foreign(path: Path) -> DcpFiles:
    """All tensors of a DCP directory from another program, under the names they have there."""
    file = path / METADATA_NAME
    with blaming(file):
        metadata = parse_metadata(file.read_bytes(), file, has_others=True)
    records = metadata.state_dict_metadata
    tensors = {name: name for name, record in records.items() if isinstance(record, TensorStorageMetadata)}
    return DcpFiles(path, metadata, tensors, None)


class DcpFiles(WeightFiles):
    """Tensors of a DCP directory; `names` has the name to give each tensor, to its name in the metadata."""

    def __init__(self, path: Path, metadata: Metadata, names: Mapping[str, str], manifest: Manifest | None) -> None:
        self._path = path
        self._names = names
        self._manifest = manifest
        self._storage: dict[Any, Any] = metadata.storage_data
        with blaming(path / METADATA_NAME):
            self._records = {name: _tensor_record(metadata, stored_name) for name, stored_name in names.items()}
            self.shapes = {name: tuple(record.size) for name, record in self._records.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._records[name].properties.dtype

    def checksums(self, boxes: Mapping[str, Box]) -> dict[Path, FileEntry]:
        if self._manifest is None:
            return {}
        files = {
            self._location(name, chunk)[0]
            for name, box in boxes.items()
            for chunk in self._records[name].chunks
            if _overlap(box, chunk) is not None
        }
        return {file: self._manifest.entry(file.name) for file in files}

    def read(self, name: str, box: Box) -> Tensor:
        block = torch.empty([cut.stop - cut.start for cut in box], dtype=self._records[name].properties.dtype)
        filled = 0
        for chunk in self._records[name].chunks:
            common = _overlap(box, chunk)
            if common is None:
                continue
            target = block[_shifted(common, [cut.start for cut in box])]
            target.copy_(self._chunk(name, chunk)[_shifted(common, chunk.offsets)])
            filled += target.numel()
        if filled < block.numel():
            raise DamagedCheckpointError(f"{self._path} contains only a part of {name!r}. Was a rank's file left out?")
        return block

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        file, location = self._location(name, chunk)
        with blaming(file), file.open("rb") as stream:
            saved = load_pickle(file_window(stream, location.offset, location.length), file, mmap=False)
        if not isinstance(saved, Tensor) or saved.shape != chunk.sizes:
            raise DamagedCheckpointError(f"{file} contains something else where {name!r} should be.")
        return saved

    def _location(self, name: str, chunk: ChunkStorageMetadata) -> tuple[Path, Any]:
        metadata_file = self._path / METADATA_NAME
        location = self._storage.get(MetadataIndex(self._names[name], chunk.offsets))
        if location is None:
            raise DamagedCheckpointError(f"{metadata_file} does not say where {name!r} is.")
        with blaming(metadata_file):
            if location.transform_descriptors:
                raise CheckpointError(f"{metadata_file} names stream transforms for {name!r}, which are not applied.")
            return inside(metadata_file, location.relative_path), location


def _tensor_record(metadata: Metadata, name: str) -> TensorStorageMetadata:
    record = metadata.state_dict_metadata[name]
    if not isinstance(record, TensorStorageMetadata):
        raise TypeError(f"{name!r} is not a tensor")
    if any(len(chunk.offsets) != len(record.size) or len(chunk.sizes) != len(record.size) for chunk in record.chunks):
        raise ValueError(f"a chunk of {name!r} has another number of dimensions")
    return record


def _overlap(box: Box, chunk: ChunkStorageMetadata) -> Box | None:
    """The overlap of a block and a chunk, in the full tensor's coordinates; None if they do not overlap."""
    common = tuple(
        slice(max(cut.start, offset), min(cut.stop, offset + size))
        for cut, offset, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
    )
    return common if all(cut.start < cut.stop for cut in common) else None


def _shifted(box: Box, origin: Any) -> Box:
    return tuple(slice(cut.start - at, cut.stop - at) for cut, at in zip(box, origin, strict=True))


# -- A checkpoint's tensors one at a time, by one process without a process group or an accelerator.


_CHUNK = 1 << 24  # elements compared at once, so that float64 copies stay small


class StoredTensors:
    """The named tensors of one checkpoint, assembled from the shards of all ranks."""

    def __init__(self, path: Path) -> None:
        self.manifest, metadata = read_metadata(path)
        names = list(metadata.state_dict_metadata)
        self._files = DcpFiles(path, metadata, dict(zip(names, names, strict=True)), self.manifest)
        self.specs = {name: TensorSpec(shape, self._files.dtype(name)) for name, shape in self._files.shapes.items()}
        self._verified: set[Path] = set()

    def read(self, name: str) -> Tensor:
        """The full tensor on the CPU. A shard file's checksum is compared before its first tensor is read."""
        box = tuple(slice(0, size) for size in self.specs[name].shape)
        for file in self._files.checksums({name: box}).keys() - self._verified:
            self.manifest.verify(file.name)
            self._verified.add(file)
        return self._files.read(name, box)


def difference_of_tensors(first: StoredTensors, second: StoredTensors, *, values: bool) -> dict[str, Any]:
    """The tensors that only one checkpoint has, that differ in shape or dtype, and that differ in value."""
    common = [name for name in first.specs if name in second.specs]
    alike = [name for name in common if first.specs[name] == second.specs[name]]
    distances = {name: max_difference(first.read(name), second.read(name)) for name in alike if values}
    changed = {name: distance for name, distance in distances.items() if distance is not None}
    other = [name for name in common if name not in alike]
    return {
        "only_in_a": [name for name in first.specs if name not in second.specs],
        "only_in_b": [name for name in second.specs if name not in first.specs],
        "other_kind": {name: [_kind(stored.specs[name]) for stored in (first, second)] for name in other},
        "same_kind": len(alike),
        "equal": len(alike) - len(changed) if values else None,
        "max_difference": changed if values else None,
    }


def _kind(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"


def max_difference(a: Tensor, b: Tensor) -> float | None:
    """The largest absolute difference of tensors of one kind, NaN for NaN and a number; None if they are equal."""
    a, b = a.reshape(-1), b.reshape(-1)
    if a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    kind = torch.complex128 if a.is_complex() else torch.float64
    worst = 0.0
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        x, y = x.to(kind), y.to(kind)
        same = (x == y) | (x.isnan() & y.isnan())
        largest = float(torch.where(same, 0.0, (x - y).abs()).max())
        if math.isnan(largest):
            return math.nan
        worst = max(worst, largest)
    return worst
