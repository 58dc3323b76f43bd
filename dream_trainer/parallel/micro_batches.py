"""A batch cut into micro-batches, whatever it is nested in: every tensor along its first dimension."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import xxhash
from torch import Tensor

from dream_trainer.compat.pytorch import has_values
from dream_trainer.errors import DataError
from dream_trainer.nested import leaves, map_children


def rows_of(batch: Any) -> int:
    """Number of samples: the first dimension of the first tensor that has one; 0 if there is none."""
    return next((len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def even_parts(rows: int, parts: int) -> list[int]:
    """How many of `rows` each part has; the first ones may have one more."""
    return [rows // parts + (number < rows % parts) for number in range(parts)]


def cut(batch: Any, parts: int, rows: int) -> list[Any]:
    """Cuts `batch`, lists included, into `parts` micro-batches, as `even_parts` says."""

    def part(tree: Any, first: int, end: int) -> Any:
        if isinstance(tree, Tensor) and tree.ndim and len(tree) != rows:
            raise DataError(
                f"forward_backward was given {rows} samples and a tensor of shape {list(tree.shape)}, and cuts each "
                "along its first dimension. Expand what is the same for all samples, or keep it in the model."
            )
        if (isinstance(tree, Tensor) and tree.ndim) or is_of_samples(tree, rows):
            return tree[first:end]
        return map_children(lambda child: part(child, first, end), tree)

    sizes = even_parts(rows, parts)
    return [part(batch, end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def is_of_samples(tree: Any, rows: int) -> bool:
    """Whether it is a list with one entry, that is no tensor and no container, for each of `rows` samples."""
    if not isinstance(tree, list) or len(tree) != rows:
        return False
    return not any(isinstance(entry, Tensor) or next(leaves(entry), None) is not entry for entry in tree)


def digest(batch: Any, found: int = 0) -> int:
    """Digest of the bytes of its tensors that have values, continued from `found`; waits for the device."""
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and has_values(leaf):
            values = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
            found = xxhash.xxh3_64_intdigest(values.numpy().data, seed=found)
    return found


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """The properties of a batch that decide its micro-batches' shapes; equal on all ranks that have the batch."""
    rows = rows_of(batch)

    def without_samples(tree: Any) -> Any:
        return "samples" if is_of_samples(tree, rows) else map_children(without_samples, tree)

    def look_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype
        return leaf if leaf is None or isinstance(leaf, int | str) else type(leaf)

    return tuple(map(look_of, leaves(without_samples(batch))))
