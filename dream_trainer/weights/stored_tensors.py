"""A checkpoint's tensors read one at a time, by one process without a process group or an accelerator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dream_trainer.checkpoint.manifest import read_manifest
from dream_trainer.checkpoint.safe_dcp import METADATA_NAME, VerifyingReader, parse_metadata, read_tensors
from dream_trainer.weights.safetensors_file import TensorSpec

_CHUNK = 1 << 24  # elements compared at once, so that float64 copies stay small


class StoredTensors:
    """The named tensors of one checkpoint, assembled from the shards of all ranks."""

    def __init__(self, path: Path) -> None:
        self.manifest = read_manifest(path)
        file = self.manifest.path / METADATA_NAME
        self._metadata = parse_metadata(self.manifest.read(METADATA_NAME), file)
        self._reader = VerifyingReader(self.manifest, self._metadata)
        self.specs = {
            name: TensorSpec(tuple(record.size), record.properties.dtype)
            for name, record in self._metadata.state_dict_metadata.items()
            if isinstance(record, TensorStorageMetadata)  # parse_metadata has refused the rest
        }

    def read(self, name: str) -> Tensor:
        """The full tensor on the CPU. A shard file's checksum is compared before its first tensor is read."""
        shape, dtype = self.specs[name]
        tensor = torch.empty(shape, dtype=dtype)
        read_tensors(self.manifest, self._metadata, {name: tensor}, self._reader)
        return tensor


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
