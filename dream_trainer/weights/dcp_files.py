"""A checkpoint's tensors one at a time, by one process without a process group or an accelerator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dream_trainer.checkpoint.blocks import whole_box
from dream_trainer.checkpoint.safe_dcp import DcpTensors, read_metadata
from dream_trainer.weights.export_files import TensorSpec

_CHUNK = 1 << 24  # elements compared at once, so that float64 copies stay small


class StoredTensors:
    """The named tensors of one checkpoint, assembled from the shards of all ranks."""

    def __init__(self, path: Path) -> None:
        self.manifest, metadata = read_metadata(path)
        self._files = DcpTensors(path, metadata, self.manifest)
        records = self._files.records.items()
        self.specs = {name: TensorSpec(tuple(record.size), record.properties.dtype) for name, record in records}
        self._verified: set[Path] = set()

    def read(self, name: str) -> Tensor:
        """The full tensor on the CPU. A shard file's checksum is compared before its first tensor is read."""
        box = whole_box(self.specs[name].shape)
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
