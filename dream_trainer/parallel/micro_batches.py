"""A batch cut into micro-batches, whatever it is nested in: every tensor along its first dimension."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from dream_trainer.compat.pytorch import has_values
from dream_trainer.errors import DataError
from dream_trainer.nested import leaves, map_children


def rows_of(batch: Any) -> int:
    """Number of samples: the first dimension of the first tensor that has one; 0 if there is none."""
    return next((len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def cut(batch: Any, parts: int, rows: int) -> list[Any]:
    """Cuts `batch`, lists included, into `parts` micro-batches; the first ones may have a sample more."""
    sizes = [rows // parts + (number < rows % parts) for number in range(parts)]
    split: dict[int, tuple[Tensor, ...]] = {}
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            if len(leaf) != rows:
                raise DataError(
                    f"forward_backward was given {rows} samples and a tensor of shape {list(leaf.shape)}, and cuts "
                    "each tensor into micro-batches along its first dimension. Expand what is the same for all "
                    "samples, or keep it in the model."
                )
            split[id(leaf)] = torch.split(leaf, sizes)

    def part(tree: Any, number: int) -> Any:
        if isinstance(tree, Tensor):
            return split[id(tree)][number] if tree.ndim else tree
        if is_of_samples(tree, rows):
            first = sum(sizes[:number])
            return tree[first : first + sizes[number]]
        return map_children(lambda child: part(child, number), tree)

    return [part(batch, number) for number in range(parts)]


def is_of_samples(tree: Any, rows: int) -> bool:
    """Whether it is a list with one entry, that is no tensor and no container, for each of `rows` samples."""
    if not isinstance(tree, list) or len(tree) != rows:
        return False
    return not any(isinstance(entry, Tensor) or next(leaves(entry), None) is not entry for entry in tree)


def digest(batch: Any, found: int = 0) -> int:
    """Digest of the values of its tensors that have some, continued from `found`; waits for the device."""
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and has_values(leaf):
            values = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
            found = zlib.crc32(values.numpy().tobytes(), found)
    return found


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """The properties of a batch that decide its micro-batches' shapes; equal on all ranks that have the batch."""
    rows = rows_of(batch)

    def without_samples(tree: Any) -> Any:
        return "samples" if is_of_samples(tree, rows) else map_children(without_samples, tree)

    return tuple(_look_of(leaf) for leaf in leaves(without_samples(batch)))


def _look_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if leaf is None or isinstance(leaf, int | str) else type(leaf)
