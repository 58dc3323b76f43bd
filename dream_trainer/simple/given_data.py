"""What `train=` and `val=` may be, as loaders that DreamTrainer reads.

Samples become batches here: those of a dataset, of arrays, and of a list. What is neither yields batches by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.data.nested import leaves
from dream_trainer.data.ordered import OrderedDataset
from dream_trainer.errors import DataError
from dream_trainer.simple.described import described


@runtime_checkable
class MapStyle(Protocol):
    """A dataset by number: torch's, Hugging Face's, any sequence of samples."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


@runtime_checkable
class Array(Protocol):
    """Samples along a first dimension: a tensor, numpy's array, a table of pandas."""

    def __array__(self) -> Any: ...


class LoaderOptions(NamedTuple):
    """How datasets become loaders.

    Attributes:
        batch_size: Samples in one rank's batch.
        shuffle: Whether each epoch has a random order of its own; an OrderedDataset, as a Mixture, has its order.
        workers: Processes that load.
        collate: Makes a batch of a list of samples; None is torch's.
    """

    batch_size: int
    shuffle: bool
    workers: int
    collate: Callable[[list[Any]], Any] | None


def as_loader(data: Any, options: LoaderOptions, name: str) -> Any:
    """A loader over `data`: samples are batched, a loader stays as it is.

    Args:
        data: A loader, a dataset, arrays, a list of samples, an iterable of batches, or a function that makes one; a
            dict of them by name.
        options: For samples.
        name: Of the argument, for messages.

    Raises:
        DataError: It is none of these, or its items could be samples as well as batches.
    """
    if isinstance(data, Mapping) and not _are_arrays(data.values()):
        return {key: as_loader(value, options, f"{name}[{key!r}]") for key, value in data.items()}
    if isinstance(data, IterableDataset):
        return DataLoader(data, options.batch_size, num_workers=options.workers, collate_fn=options.collate)
    dataset = _dataset(data, options, name)
    if dataset is not None:
        return DistributedDataLoader(
            dataset,
            options.batch_size,
            shuffle=options.shuffle and not isinstance(dataset, OrderedDataset),
            drop_last=False,
            num_workers=options.workers,
            collate_fn=options.collate,
        )
    if isinstance(data, Iterator):
        return _Once(data, name)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | type):
        return data
    if callable(data) and not isinstance(data, type):
        return _Made(data)
    raise DataError(
        f"{name}={data!r} is no data. Give a DataLoader, a dataset, arrays (inputs, targets), a list of samples, an "
        "iterable of batches, or a function that makes one."
    )


# -- samples


def _dataset(data: Any, options: LoaderOptions, name: str) -> Any:
    """`data` as a dataset by number; None if it is not made of samples."""
    if isinstance(data, Mapping):
        return NamedArrays({key: _tensor(array, f"{name}[{key!r}]") for key, array in data.items()}, name)
    if isinstance(data, Array):
        return _tensor(data, name)
    if isinstance(data, tuple) and data and isinstance(data[0], Array):
        if not _are_arrays(data):
            raise DataError(
                f"{name}= is a tuple of {', '.join(type(part).__name__ for part in data)}. Make each of them an array "
                "of all samples, by numpy.asarray, or give a list of samples."
            )
        tensors = [_tensor(array, name) for array in data]
        _check_lengths([len(tensor) for tensor in tensors], name)
        return TensorDataset(*tensors)
    if isinstance(data, list | tuple):
        if options.collate is None:  # which takes samples
            _refuse_doubtful(data, name)
        return data
    is_dataset = isinstance(data, MapStyle) and not isinstance(data, str | bytes | type)
    return data if is_dataset else None


class NamedArrays(Dataset[dict[str, Tensor]]):
    """Samples that are dicts, of arrays by name."""

    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        _check_lengths([len(tensor) for tensor in tensors.values()], name)
        self.tensors = tensors

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))


def _are_arrays(parts: Iterable[Any]) -> bool:
    kinds = [isinstance(part, Array) for part in parts]
    return bool(kinds) and all(kinds)


def _tensor(array: Any, name: str) -> Tensor:
    try:
        # A copy where torch could not take the memory as it is: read-only, or read backwards.
        found = array if isinstance(array, Tensor) else torch.as_tensor(np.require(array, requirements=["C", "W"]))
    except TypeError as error:
        raise DataError(
            f"{name}= has an array of {np.asarray(array).dtype}, which no tensor can be made of. Give numbers."
        ) from error
    if found.dim() == 0:
        raise DataError(f"{name}= has an array of a single number. Give arrays of all samples: (inputs, targets).")
    return found


def _check_lengths(lengths: Sequence[int], name: str) -> None:
    if len(set(lengths)) > 1:
        raise DataError(f"{name}= has arrays of {', '.join(map(str, lengths))} samples. Give as many of each.")


def _refuse_doubtful(items: Sequence[Any], name: str) -> None:
    """Raises if the items of a list could be batches as well as samples. The first one is looked at."""
    first = items[0] if items else None
    if isinstance(first, Dataset | DataLoader):
        raise DataError(f"{name}= is a list of {type(first).__name__}s. Give them by name: a dict of them.")
    parts = list(leaves(first))
    if not all(isinstance(part, Tensor | np.ndarray) and part.ndim > 0 for part in parts):
        return
    if len({len(part) for part in parts}) == 1:
        raise DataError(
            f"{name}= is a {type(items).__name__} whose first item, {described(first)}, could be a sample or a batch. "
            f"Give DataLoader({name}, batch_size=32) for samples, DataLoader({name}, batch_size=None) for batches, or "
            "a tuple (inputs, targets) of arrays of all samples."
        )


# -- batches


class _Made:
    """The batches that a function makes, anew in each pass."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class _Once:
    """The batches of a generator, which cannot be begun again."""

    def __init__(self, batches: Iterator[Any], name: str) -> None:
        self._batches, self._name = batches, name
        self._was_begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._was_begun:
            raise DataError(
                f"{self._name}= is a generator, which is used up after one pass, and another one is to begin. Give the "
                f"function that makes it: {self._name}=batches, not {self._name}=batches()."
            )
        self._was_begun = True
        return self._batches
