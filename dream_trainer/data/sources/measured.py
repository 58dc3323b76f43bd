"""Lengths of samples, measured once, for sources that do not know theirs; and long documents cut into pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from dream_trainer.checks import check_count, refuse
from dream_trainer.data.sources.token_file import located
from dream_trainer.errors import DataError

FOLLOWING = "following"  # name of the token id that follows a piece in its document


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
                f"there are lengths of shape {self.lengths.shape} for {len(dataset)} samples. Measure them again."
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
            there = ", ".join(map(repr, sample))
            raise DataError(f"sample {index} has no {self.field!r}, but {there}. Name its token ids in field=.")
        return len(sample[self.field])


def lengths_of(source: Any, name: str | None = None) -> Any:
    if not isinstance(source, Measured):
        raise DataError(
            f"{'' if name is None else f'source {name!r} '}({type(source).__name__}) does not say how many tokens its "
            "samples have: it needs an attribute `lengths`. Write it with `dream-trainer data tokenize`, or use "
            "WithLengths(source, measure_lengths(source))."
        )
    return source.lengths


def mean_lengths(sources: Mapping[str, Any]) -> list[float]:
    means = []
    for name, source in sources.items():
        lengths = np.asarray(lengths_of(source, name))
        means.append(float(lengths.sum(dtype=np.int64)) / len(lengths))
        refuse(not means[-1] > 0, f"the samples of source {name!r} have no tokens.", DataError)
    return means


class Pieces(Dataset[dict[str, Any]]):
    """The documents of a source, those longer than `length` cut into pieces of that many tokens.

    Rows cut long documents too; but all rows of a document are then of one block, and come close together, as do the
    weights of a mixture's stages. Pieces of all documents come in random order. A piece is a dict: its "tokens", and,
    unless it ends its document, the token that is "following", which its last token predicts.

    Args:
        source: Arrays of token ids that say their `lengths`, such as a `TokenFile`.
        length: Tokens of the longest piece; take the `row_length` of the rows.

    Raises:
        DataError: `source` does not say its lengths, or `length` is no positive integer.

    Example:
        ```python
        sources = {name: Pieces(TokenFile(f"tokens/{name}"), 1024) for name in ("code", "docs")}
        mixture = Mixture(sources, weights={"code": 3, "docs": 1}, unit="tokens")
        rows = PackedRows(mixture, row_length=1024)
        ```
    """

    def __init__(self, source: Any, length: int) -> None:
        check_count("length", length, hint="Give the tokens of the longest piece.")
        self.source: Any = source
        self.length = length
        counts = np.maximum(-(-np.asarray(lengths_of(source), dtype=np.int64) // length), 1)
        self._ends = np.cumsum(counts)
        self._lengths: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        document, number = located(self._ends, index, "piece")
        begin = number * self.length
        tokens = np.asarray(self.source[document])
        if tokens.ndim != 1:
            raise DataError(
                f"document {document} is of type {type(self.source[document]).__name__} and no row of token ids, which "
                "is what Pieces cuts."
            )
        piece: dict[str, Any] = {"tokens": tokens[begin : begin + self.length]}
        if begin + self.length < len(tokens):
            piece[FOLLOWING] = tokens[begin + self.length]
        return piece

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each piece, shape `(len(self),)`."""
        if self._lengths is None:
            of_documents = np.asarray(self.source.lengths, dtype=np.int64)
            self._lengths = np.full(len(self), self.length, dtype=np.int64)
            before = np.concatenate(([0], self._ends[:-1]))
            self._lengths[self._ends - 1] = of_documents - (self._ends - before - 1) * self.length
        return self._lengths

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_lengths": None}
