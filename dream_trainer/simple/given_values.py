"""A digest of the values that data and losses have: two runs that look alike in words are told apart by it.

A bounded sample is read, so that big data costs no pass: arrays of up to 4 MiB whole, 64 blocks of larger ones, and of
a list 256 items. A dataset with code of its own is not asked for a sample: it may be slow, or random.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.nested import leaves
from dream_trainer.simple.given_data import NamedArrays

_ARRAY_BYTES, _BLOCKS, _ITEMS = 1 << 22, 64, 256
_OF_EVERY_MODULE = frozenset({"training", "call_super_init", "dump_patches"})


def values_digest(loader: Any) -> str | None:
    """Of what a loader, or a dict of them by name, reads; None where that is code of the user's."""
    if isinstance(loader, Mapping):
        return ", ".join(f"{name}: {values_digest(one)}" for name, one in loader.items())
    dataset = loader.dataset if isinstance(loader, DataLoader | DistributedDataLoader) else loader
    if isinstance(dataset, TensorDataset):
        return _digest(dataset.tensors)
    if isinstance(dataset, NamedArrays):
        return _digest([*dataset.tensors, *dataset.tensors.values()])
    if isinstance(dataset, Tensor):
        return _digest([dataset])
    if isinstance(dataset, list | tuple):
        step = max(1, len(dataset) // _ITEMS)
        return _digest(leaf for item in dataset[::step] for leaf in leaves(item))
    return None


def options_of(loss: Any) -> str:
    """`label_smoothing=0.1, reduction='mean'`: what a loss was built with, as far as it tells; tensors as digests."""
    if isinstance(loss, functools.partial):
        given: Mapping[str, Any] = loss.keywords
    elif isinstance(loss, nn.Module):
        given = vars(loss) | dict(loss.named_buffers())
    else:
        return ""
    found: dict[str, str | int | float | None] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            found[name] = _digest([value])
        elif not name.startswith("_") and name not in _OF_EVERY_MODULE and isinstance(value, str | int | float | None):
            found[name] = value
    return ", ".join(f"{name}={found[name]!r}" for name in sorted(found))


def _digest(values: Iterable[Any]) -> str:
    state = xxhash.xxh3_64()
    for value in values:
        if isinstance(value, Tensor | np.ndarray):
            state.update(f"{value.dtype} {[*value.shape]}".encode())
            for block in _blocks(torch.as_tensor(value) if _is_plain(value) else None):
                state.update(block.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        elif isinstance(value, str | bytes | int | float):
            state.update(repr(value).encode())
        else:
            state.update(type(value).__name__.encode())
    return state.hexdigest()


def _is_plain(value: Tensor | np.ndarray) -> bool:
    """Whether its bytes can be read as they lie there."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" and value.flags.writeable and min(value.strides, default=1) > 0
    return value.layout is torch.strided


def _blocks(array: Tensor | None) -> Iterator[Tensor]:
    if array is None:
        return
    size = array.numel() * array.element_size()
    if size <= _ARRAY_BYTES or array.dim() == 0:
        yield array
        return
    rows = len(array)
    in_block = max(1, rows * (_ARRAY_BYTES // _BLOCKS) // size)
    starts = {number * (rows - in_block) // (_BLOCKS - 1) for number in range(_BLOCKS)}
    for start in sorted(starts):
        yield array[start : start + in_block]
