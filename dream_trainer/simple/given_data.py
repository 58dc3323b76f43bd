"""Training and validation data as loaders: samples become batches here, and anything else yields batches by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dream_trainer.data.loader import DistributedDataLoader, PerRankLoader
from dream_trainer.data.ordered import OrderedDataset
from dream_trainer.errors import DataError
from dream_trainer.nested import leaves
from dream_trainer.simple.model_calls import shapes


@runtime_checkable
class MapStyle(Protocol):
    """A dataset by number: PyTorch's, Hugging Face's, any sequence of samples."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


@runtime_checkable
class Array(Protocol):
    """Samples along a first dimension: a tensor, numpy's array, a table of pandas."""

    def __array__(self) -> Any: ...


class LoaderOptions(NamedTuple):
    """Batch size of a rank, whether each epoch has an order of its own, and the type that float64 arrays get."""

    batch_size: int
    shuffle: bool
    floats: torch.dtype | None = None


def as_loader(data: Any, options: LoaderOptions, name: str) -> Any:
    """A loader over `data`: samples are batched, a loader stays as it is.

    A dict has several by name. `name` is that of the argument, for messages.
    """
    if isinstance(data, Mapping) and not _are_arrays(data.values()):
        return {key: as_loader(value, options, f"{name}[{key!r}]") for key, value in data.items()}
    if isinstance(data, IterableDataset):
        return DataLoader(data, options.batch_size)
    dataset = _dataset(data, options, name)
    if dataset is not None:
        collate = functools.partial(_named, [*data]) if isinstance(data, Mapping) else None
        shuffle = options.shuffle and not isinstance(dataset, OrderedDataset)
        return DistributedDataLoader(dataset, options.batch_size, shuffle=shuffle, drop_last=False, collate_fn=collate)
    if isinstance(data, PerRankLoader) or (isinstance(data, Iterable) and not isinstance(data, str | bytes | type)):
        return data
    if callable(data) and not isinstance(data, type):
        return _Made(data)
    raise DataError(
        f"{name}={data!r} is no data. Give a DataLoader, a dataset, arrays (inputs, targets), a list of samples, an "
        "iterable of batches, or a function that makes one."
    )


def _dataset(data: Any, options: LoaderOptions, name: str) -> Any:
    """`data` as a dataset by number; None if it is not made of samples."""
    if isinstance(data, Array):
        return _tensor(data, options)
    if isinstance(data, Mapping | tuple):
        parts = [*data.values()] if isinstance(data, Mapping) else [*data]
        arrays = [_tensor(part, options) for part in parts] if _are_arrays(parts) else []
        if not arrays or len({array.shape[:1] for array in arrays} | {arrays[0].shape[:1] or None}) > 1:
            raise DataError(
                f"{name}= has {shapes(arrays or [*map(type, parts)])}. Make each of them an array of all samples by "
                "numpy.asarray, of one first dimension; or give a list of samples."
            )
        return TensorDataset(*arrays)
    if isinstance(data, list):
        _refuse_doubtful(data, name)
    is_dataset = isinstance(data, MapStyle) and not isinstance(data, str | bytes | type)
    return data if is_dataset else None


def _named(names: list[str], samples: list[tuple[Tensor, ...]]) -> dict[str, Any]:
    return dict(zip(names, default_collate(samples), strict=True))


def _are_arrays(parts: Iterable[Any]) -> bool:
    kinds = [isinstance(part, Array) for part in parts]
    return bool(kinds) and all(kinds)


def _tensor(array: Any, options: LoaderOptions) -> Tensor:
    if isinstance(array, Tensor):
        return array
    # A copy if PyTorch cannot use the memory: read-only, or with negative strides.
    found = torch.as_tensor(np.require(array, requirements=["C", "W"]))
    return found.to(options.floats) if found.dtype is torch.float64 and options.floats is not None else found


def _refuse_doubtful(items: list[Any], name: str) -> None:
    """Looks at the first item only."""
    parts = list(leaves(items[0] if items else None))
    are_arrays = all(isinstance(part, Tensor | np.ndarray) and part.ndim > 0 for part in parts)
    is_loader = isinstance(parts[0] if parts else None, Dataset | DataLoader)
    if is_loader or (are_arrays and len({len(part) for part in parts}) == 1):
        raise DataError(
            f"{name}= is a list whose first item, {shapes(items[0])}, could be a sample or a batch. Give "
            f"DataLoader({name}, batch_size=32) for samples, DataLoader({name}, batch_size=None) for batches, a tuple "
            "(inputs, targets) of arrays of all samples, or a dict of several data by name."
        )


class _Made:
    """The batches that a function makes for each pass."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def as_rows(data: Any) -> Any:
    """A list of rows of numbers, or of arrays of one dimension, as one array; anything else as it is."""
    are_rows = isinstance(data, list) and data and all(isinstance(row, list | Array) for row in data)
    rows = [np.asarray(row) for row in data] if are_rows else []
    return np.stack(rows) if rows and all(row.ndim == 1 and row.dtype.kind in "biuf" for row in rows) else data
