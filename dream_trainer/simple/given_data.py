"""What `train=` and `val=` may be, as loaders that DreamTrainer reads.

Samples become batches here: those of a dataset, of arrays, and of a list. What is neither yields batches by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dream_trainer.data.loader import DistributedDataLoader, PerRankLoader
from dream_trainer.data.ordered import OrderedDataset
from dream_trainer.errors import DataError
from dream_trainer.nested import leaves
from dream_trainer.simple.described import described

_AS_ARRAYS = "Make each of them an array of all samples, by numpy.asarray"


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
        floats: What float64 arrays of numpy and pandas become, whose own type that is; None leaves them.
    """

    batch_size: int
    shuffle: bool
    workers: int
    collate: Callable[[list[Any]], Any] | None
    floats: torch.dtype | None = None


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
    if _is_of_scipy(data):
        raise DataError(
            f"{name}= is a {type(data).__name__}, a sparse matrix. Give its toarray(), or a dataset of rows."
        )
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
            collate_fn=options.collate or functools.partial(_batched, name),
        )
    if isinstance(data, Iterator):
        return _Once(data, name)
    if isinstance(data, PerRankLoader) or (isinstance(data, Iterable) and not isinstance(data, str | bytes | type)):
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
        return NamedArrays({k: _tensor(array, f"{name}[{k!r}]", options) for k, array in data.items()}, name)
    if isinstance(data, Array):
        return _tensor(data, name, options)
    if isinstance(data, tuple) and data and isinstance(data[0], Array):
        if not _are_arrays(data):
            raise DataError(
                f"{name}= is a tuple of {', '.join(type(part).__name__ for part in data)}. {_AS_ARRAYS}, or give a "
                "list of samples."
            )
        tensors = [_tensor(array, name, options) for array in data]
        _check_lengths([len(tensor) for tensor in tensors], name)
        return TensorDataset(*tensors)
    if isinstance(data, tuple) and (any(_is_of_scipy(part) for part in data) or _are_columns(data)):
        kinds = ", ".join(type(part).__name__ for part in data)
        advice = "Give x.toarray()" if any(_is_of_scipy(part) for part in data) else _AS_ARRAYS
        raise DataError(f"{name}= is a tuple of {kinds}. {advice}, or give a list of samples.")
    if isinstance(data, list | tuple):
        if options.collate is None:  # which takes samples
            _refuse_doubtful(data, name)
        return data
    is_dataset = isinstance(data, MapStyle) and not isinstance(data, str | bytes | type)
    return data if is_dataset else None


def _are_columns(parts: Sequence[Any]) -> bool:
    """Whether these are lists of all samples, of rows and of a number for each, and not samples."""
    if len(parts) < 2 or not all(isinstance(part, list) and part for part in parts):
        return False
    has_rows = isinstance(parts[0][0], list | int | float) and not isinstance(parts[-1][0], list)
    return has_rows and len({len(part) for part in parts}) == 1


def _is_of_scipy(data: Any) -> bool:
    return type(data).__module__.startswith("scipy.sparse")


def _batched(name: str, samples: list[Any]) -> Any:
    """torch's way of making a batch, which says what to do where it cannot."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        shown = ", ".join(described(sample) for sample in samples[:2])
        raise DataError(
            f"samples of {name}= make no batch: {error}. They are {shown}, ... Give all one shape, of tensors, arrays "
            "and numbers, or collate=, a function that makes a batch of a list of samples, such as a padded one."
        ) from error


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


def _tensor(array: Any, name: str, options: LoaderOptions) -> Tensor:
    if isinstance(array, np.ma.MaskedArray) and (masked := int(np.sum(array.mask))):
        raise DataError(
            f"{name}= has a masked array, {masked} of whose {array.size} values are masked. A model would see what "
            "lies under the mask: give x.filled(0), say, and x.mask as another array where the model is to know it."
        )
    try:
        # A copy where torch could not take the memory as it is: read-only, or read backwards.
        found = array if isinstance(array, Tensor) else torch.as_tensor(np.require(array, requirements=["C", "W"]))
    except TypeError as error:
        raise DataError(
            f"{name}= has an array of {np.asarray(array).dtype}, which no tensor can be made of. Give numbers."
        ) from error
    if found.layout is not torch.strided:
        raise DataError(
            f"{name}= has a tensor of layout {found.layout}, of which no batches are made. Give x.to_dense()."
        )
    if found.dim() == 0:
        raise DataError(f"{name}= has an array of a single number. Give arrays of all samples: (inputs, targets).")
    is_numpys_own = not isinstance(array, Tensor) and found.dtype is torch.float64
    return found.to(options.floats) if is_numpys_own and options.floats is not None else found


def float_type(model: torch.nn.Module) -> torch.dtype | None:
    """Of the model's first floating-point parameter; None if it has none."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


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


def can_begin_again(loaders: Any) -> bool:
    """Whether a loader, or each of several by name, can be read more than once; None cannot."""
    parts = [*loaders.values()] if isinstance(loaders, Mapping) else [loaders]
    return not any(part is None or isinstance(part, _Once) for part in parts)


# -- what is predicted


def as_rows(data: Any, train: Any) -> Any:
    """What is predicted for: an array of a list of rows, which are lists of numbers or arrays of one shape; anything
    else as it is.

    Raises:
        DataError: Rows of numbers have several lengths; or it is a single sample of what `train` loads.
    """
    rows = _array_of_rows(data)
    _refuse_one_row(rows, train)
    return rows


def _array_of_rows(data: Any) -> Any:
    if not isinstance(data, list) or not data:
        return data
    if all(isinstance(row, list) and row and all(isinstance(n, int | float) for n in row) for row in data):
        lengths = sorted({len(row) for row in data})
        if len(lengths) > 1:
            raise DataError(
                f"the data are rows of {', '.join(map(str, lengths))} numbers. Give rows of one length, or a "
                "DataLoader whose collate_fn pads them."
            )
        return np.asarray(data)
    if all(isinstance(row, Tensor | np.ndarray) and row.ndim == 1 for row in data) and len({len(r) for r in data}) == 1:
        return torch.stack(data) if isinstance(data[0], Tensor) else np.stack(data)
    return data


def _refuse_one_row(data: Any, train: Any) -> None:
    """Raises DataError for an array of one dimension less than the inputs that are trained with: one sample."""
    dataset = train.dataset if isinstance(train, DataLoader | DistributedDataLoader) else None
    if not isinstance(dataset, TensorDataset) or not isinstance(data, Array):
        return
    shape, trained = np.shape(data), dataset.tensors[0].shape
    if len(shape) == len(trained) - 1 and tuple(shape) == tuple(trained[1:]):
        raise DataError(
            f"predict() takes samples along the first dimension, and got {list(shape)}, which is one of those trained "
            f"with ({list(trained)}). Give x[None] for one sample."
        )
