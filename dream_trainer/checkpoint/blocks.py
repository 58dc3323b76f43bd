"""Blocks of tensors: which one a rank has of each, and reading saved ones without running anybody's code."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from dream_trainer.checkpoint.files import FileEntry, blaming
from dream_trainer.compat.pytorch import is_dtensor, local_tensor, shard_dim
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.parallel.sharding import local_indices

Box = tuple[slice, ...]  # a block of a tensor: one slice per dimension, with start and stop


@dataclass(frozen=True)
class WeightFiles:
    """Named tensors on disk."""

    shapes: Mapping[str, tuple[int, ...]]  # of the whole tensors
    read: Callable[[str, Box], Tensor]
    # A block of a tensor, on the CPU, in the file's dtype. It may be a view of the file: not to be written to.
    checksums: Callable[[Mapping[str, Box]], dict[Path, FileEntry]] = lambda boxes: {}
    # The files that contain these blocks, with size and checksum, if those are known.


class Part(NamedTuple):
    box: Box  # the smallest block around a rank's shard of a tensor
    rows: Mapping[int, Tensor]  # which rows of the block it has, by dimension, if not all

    def of(self, block: Tensor) -> Tensor:
        for dim, rows in self.rows.items():
            block = block.index_select(dim, rows)
        return block


def whole_box(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, size) for size in shape)


def part_of(tensor: Tensor) -> Part:
    """The part of a tensor that this rank has; no communication."""
    box = list(whole_box(tensor.shape))
    local = local_tensor(tensor)
    if not is_dtensor(tensor) or not local.numel():
        return Part(tuple(box), {})
    picked = {}
    for dim in {cut for placement in tensor.placements if (cut := shard_dim(placement)) is not None}:
        rows = local_indices(tensor, dim)
        if len(rows) != local.shape[dim]:
            raise CheckpointError(
                f"a parameter of shape {tuple(tensor.shape)} with placements {tensor.placements} has "
                f"{local.shape[dim]} rows of dimension {dim} here, instead of {len(rows)}. Shard with fully_shard, "
                "parallelize_module or distribute_tensor."
            )
        first, last = int(rows[0]), int(rows[-1])
        box[dim] = slice(first, last + 1)
        if last + 1 - first != len(rows):
            picked[dim] = rows - first
    return Part(tuple(box), picked)


def inside(file: Path, name: str) -> Path:
    """The path of `name` in the directory of the `file` that refers to it, which may be untrusted."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DamagedCheckpointError(f"{file} refers to {name!r}, outside its directory. Do not use it.")
    return file.parent / name


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
