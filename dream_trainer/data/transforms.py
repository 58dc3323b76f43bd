"""Transforms of samples, in order: map, filter, batch, unbatch, shuffle. On streams they work on blocks that carry
nothing over, so a place is the source's state at a block's start and a number of samples. A TransformedDataset reads
its samples by number."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from dream_trainer.checks import check_count
from dream_trainer.data.sampler import random_order
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_cpu
from dream_trainer.errors import DataError

_SMALLEST_BLOCK = 64


@dataclass(slots=True)
class Item:
    value: Any
    number: int
    shard: str
    index: int


class Transform(ABC):
    """One transform of samples."""

    block = 1  # a block of samples is a multiple of this

    @abstractmethod
    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        """The samples of one block, transformed."""


@dataclass(frozen=True)
class Map(Transform):
    """Replaces each sample by `function(sample)`. Its draws from `random`, NumPy and torch are seeded by sample."""

    function: Callable[[Any], Any]

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        for item in items:
            for value in calls(self.function, item):
                yield Item(value, item.number, item.shard, item.index)


@dataclass(frozen=True)
class Filter(Transform):
    """Keeps the samples if `function(sample)` is true."""

    function: Callable[[Any], Any]

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        for item in items:
            if any(calls(self.function, item)):
                yield item


@dataclass(frozen=True)
class Batch(Transform):
    """Puts `size` consecutive samples into a list, e.g. for a tokenizer that takes many at once; what follows, and a
    batch of the loader, counts each list as one sample. The last of an epoch, and of a block after a `Filter`, may be
    shorter."""

    size: int

    def __post_init__(self) -> None:
        check_count("Batch: size", self.size, hint="Give the samples of one list.")

    block = property(attrgetter("size"))

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        while batch := list(islice(items, self.size)):
            first = batch[0]
            yield Item([item.value for item in batch], first.number, first.shard, first.index)


@dataclass(frozen=True)
class Unbatch(Transform):
    """Makes each item of a list a separate sample, e.g. of a tokenizer's result for a `Batch`."""

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        for item in items:
            for place, value in enumerate(item.value):
                yield Item(value, part_number(item, place), item.shard, item.index + place)


def part_number(item: Item, place: int) -> int:
    """The number that stands for one of several samples made of `item`, for its draws: no other sample's."""
    return hash_seed(b"part", item.number, place)


@dataclass(frozen=True)
class Shuffle(Transform):
    """Puts each `window` consecutive samples of a lane into random order; they are in memory together."""

    window: int

    def __post_init__(self) -> None:
        check_count("Shuffle: window", self.window, hint="Give the samples that are shuffled together.")

    block = property(attrgetter("window"))

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        while window := list(islice(items, self.window)):
            for place in random_order(len(window), calls.seed(window[0])).tolist():
                yield window[place]


@dataclass(slots=True)
class SampleCalls:
    """Calls a user's functions on the samples of one lane, seeded, and does what was chosen where one raises."""

    seed: int
    lane: int
    max_skipped: int
    skipped: int = 0
    reports: list[str] = field(default_factory=list)

    def transformed(self, transforms: Sequence[Transform], items: Iterator[Item]) -> Iterator[Item]:
        for stage, transform in enumerate(transforms):
            items = transform.over(items, StageCalls(self, stage))
        return items

    def failed(self, item: Item, error: Exception) -> None:
        what = f"sample {item.index} of {item.shard}: {type(error).__name__}: {error}"
        self.skipped += 1
        self.reports.append(what)
        if self.skipped > self.max_skipped:
            raise DataError(
                f"{what}. With it {self.skipped} samples would be skipped in lane {self.lane}, and "
                f"max_skipped={self.max_skipped}. Mend the data, or raise max_skipped."
            ) from error


@dataclass(frozen=True, slots=True)
class StageCalls:
    """The calls of one transform in the list: two of them draw different numbers for the same sample."""

    calls: SampleCalls
    stage: int

    def __call__(self, function: Callable[[Any], Any], item: Item) -> list[Any]:
        """The function's result, or none if it raised, and the sample is skipped."""
        seed_cpu(self.seed(item))
        try:
            return [function(item.value)]
        except Exception as error:
            self.calls.failed(item, error)
            return []

    def seed(self, item: Item) -> int:
        return hash_seed(b"transform", self.calls.seed, self.calls.lane, item.number, self.stage)


def description(transform: Transform) -> str:
    """A transform and its plain options, which decide the samples; functions are not distinguished."""
    options: dict[str, Any] = vars(transform) if is_dataclass(transform) else {}
    told = [f"{name}={value!r}" for name, value in options.items() if value is None or isinstance(value, int | str)]
    return f"{type(transform).__name__}({', '.join(told)})"


def block_size(transforms: Sequence[Transform]) -> int:
    """Samples in a block: a multiple of the number that each transform takes at once."""
    together = math.lcm(*(transform.block for transform in transforms))
    return together * -(-_SMALLEST_BLOCK // together)


@dataclass(frozen=True)
class Pack(Transform):
    """Packs documents into rows of `row_length` tokens, as `PackedRows` does; later transforms see rows.

    A document is an array, tensor or list of token ids, or a mapping that has them under `field`: tokenise it by a
    `Map` before. `documents` consecutive documents of a lane are in memory together and packed among themselves; their
    rows come in random order. The more there are, the fuller rows are, and the more a resume reads again.

    Attributes:
        row_length: Tokens in a row.
        documents: Documents that are packed together.
        method: "best_fit" or "concatenate"; see PackedRows, as the others.
        pad_id: Token id of padding.
        field: Name of the token ids in documents that are mappings.
        vocabulary_size: Number of token ids; with it, each is checked.

    Raises:
        DataError: `row_length` or `documents` is not positive.
    """

    row_length: int
    documents: int = 1024
    method: Literal["best_fit", "concatenate"] = "best_fit"
    pad_id: int = 0
    field: str = "tokens"
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        check_count("Pack: row_length", self.row_length, hint="Give the number of tokens in a row.")
        check_count("Pack: documents", self.documents, hint="Give the number of documents packed together.")

    block = property(attrgetter("documents"))

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        from dream_trainer.data.packing.packed_rows import RowFormat, packer

        pack, row_format = packer(self.method), RowFormat(self.pad_id, self.field, self.vocabulary_size)
        while documents := list(islice(items, self.documents)):
            known = [(item, length) for item in documents for length in calls(self._length, item)]
            if not known:
                continue
            first, lengths = known[0][0], np.array([length for _, length in known])
            loaded = [row_format.load(item.value, n, f"sample {item.index} of {item.shard}") for item, n in known]
            rows = pack(lengths, self.row_length, 0)
            order = random_order(len(rows), hash_seed(b"rows", calls.seed(first), 0, 0))
            for number, place in enumerate(order.tolist()):
                row = row_format.row(rows[place], loaded, self.row_length)
                yield Item(row, part_number(first, number), first.shard, first.index)

    def _length(self, document: Any) -> int:
        return len(document[self.field] if isinstance(document, Mapping) else document)


class TransformedDataset(Dataset[Any]):
    """A map-style dataset seen through `Map` and `Filter`, in their order.

    Give it to a `DistributedDataLoader`, which seeds what functions draw by sample, or to a `Mixture` as a source. A
    `Filter` is computed once, here: it loads every sample. Give every rank the same `seed`.

    Args:
        dataset: Map-style.
        transforms: Applied in this order.
        seed: Seed of random draws in filters.

    Raises:
        DataError: The dataset is empty or nothing of it is kept, a sample is broken, or a transform is neither a `Map`
            nor a `Filter`.
    """

    def __init__(self, dataset: Any, transforms: Sequence[Transform], *, seed: int = 0) -> None:
        self._dataset, self._name = dataset, type(dataset).__name__
        self._functions: list[Callable[[Any], Any]] = []
        self._indices: Sequence[int] = range(len(dataset))  # that filters keep
        for stage, transform in enumerate(transforms):
            if isinstance(transform, Map):
                self._functions.append(transform.function)
            elif isinstance(transform, Filter):
                of_stage = hash_seed(b"transform", seed, stage)
                with preserved_random_state():
                    self._indices = [index for index in self._indices if self._keeps(transform, index, of_stage)]
            else:
                raise DataError(
                    f"{type(transform).__name__} takes several samples or makes several, and samples are reached by "
                    "number here. Use it in a StreamLoader; documents of known lengths are packed by PackedRows."
                )
        if not self._indices:
            raise DataError(f"Nothing of the dataset ({self._name}) is left by its transforms. Check its filters.")

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._load(self._indices[index], self._functions)

    def _keeps(self, transform: Filter, index: int, seed: int) -> Any:
        seed_cpu(hash_seed(b"sample", seed, index))
        return self._load(index, [*self._functions, transform.function])

    def _load(self, index: int, functions: Sequence[Callable[[Any], Any]]) -> Any:
        try:
            sample = self._dataset[index]
            for function in functions:
                sample = function(sample)
        except Exception as error:
            raise DataError(
                f"sample {index} of {self._name}: {type(error).__name__}: {error}. Mend the sample, or leave it out."
            ) from error
        return sample
