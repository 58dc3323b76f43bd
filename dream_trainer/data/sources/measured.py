"""Lengths of samples, measured once, for sources that do not know theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from dream_trainer.errors import DataError


@runtime_checkable
class Measured(Protocol):
    """A source that knows how long its samples are without loading them."""

    @property
    def lengths(self) -> npt.NDArray[np.integer[Any]]:
        """Tokens of each sample, shape `(len(source),)`."""
        ...


class WithLengths(Dataset[Any]):
    """A dataset that says how long its samples are, for mixtures by tokens and for packing.

    Args:
        dataset: Map-style.
        lengths: Tokens of each sample, such as `measure_lengths(dataset)`; shape `(len(dataset),)`.

    Raises:
        DataError: There are more or fewer lengths than samples.
    """

    def __init__(self, dataset: Any, lengths: npt.ArrayLike) -> None:
        self.dataset = dataset
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if self.lengths.shape != (len(dataset),):
            raise DataError(
                f"there are lengths of shape {self.lengths.shape} for {len(dataset)} samples. Measure them anew."
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def measure_lengths(
    dataset: Any, *, field: str = "tokens", num_workers: int = 0, length: Callable[[Any], int] | None = None
) -> npt.NDArray[np.int64]:
    """Loads every sample once, and says how long each is. Keep the result in a file: `np.save`.

    Args:
        dataset: Map-style.
        field: Name of the token ids in samples that are mappings.
        num_workers: Processes that load.
        length: Tokens of a sample, of any kind. None: the sample's `len`, or of a mapping that of its `field`.

    Returns:
        Shape `(len(dataset),)`, int64.

    Raises:
        DataError: A sample is a mapping without `field`.
    """
    measured = DataLoader(_Measure(dataset, field, length), batch_size=None, num_workers=num_workers)
    return np.fromiter((int(value) for value in measured), dtype=np.int64, count=len(dataset))


class _Measure(Dataset[int]):
    def __init__(self, dataset: Any, field: str, length: Callable[[Any], int] | None) -> None:
        self.dataset, self.field, self.length = dataset, field, length

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        sample = self.dataset[index]
        if self.length is not None:
            return int(self.length(sample))
        if not isinstance(sample, Mapping):
            return len(sample)
        if self.field not in sample:
            raise DataError(
                f"sample {index} has no {self.field!r}, but {', '.join(map(repr, sample))}. Name its token ids in "
                "field=."
            )
        return len(sample[self.field])


def lengths_of(name: str, source: Any) -> Any:
    if not isinstance(source, Measured):
        raise DataError(
            f"source {name!r} ({type(source).__name__}) does not say how many tokens its samples have: it needs an "
            "attribute `lengths`. Write it with `dream-trainer data tokenize`, or measure_lengths(dataset)."
        )
    return source.lengths


def mean_lengths(sources: Mapping[str, Any]) -> list[float]:
    means = []
    for name, source in sources.items():
        lengths = np.asarray(lengths_of(name, source))
        means.append(float(lengths.sum(dtype=np.int64)) / len(lengths))
        if not means[-1] > 0:
            raise DataError(f"the samples of source {name!r} have no tokens.")
    return means
