"""Transforms of samples, in order: map, filter, batch, unbatch, shuffle. On streams they work on blocks that carry
nothing over, so a place is the source's state at a block's start and a number of samples. A TransformedDataset reads
its samples by number."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from dream_trainer.checks import check_count
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_cpu
from dream_trainer.errors import DataError
from dream_trainer.screen import logger

OnError = Literal["raise", "skip"]
SKIPPED = object()
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
            value = calls(self.function, item)
            if value is not SKIPPED:
                yield Item(value, item.number, item.shard, item.index)


@dataclass(frozen=True)
class Filter(Transform):
    """Keeps the samples if `function(sample)` is true."""

    function: Callable[[Any], Any]

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        for item in items:
            keeps = calls(self.function, item)
            if keeps is not SKIPPED and keeps:
                yield item


@dataclass(frozen=True)
class Batch(Transform):
    """Puts `size` consecutive samples into a list, e.g. for a tokenizer that takes many at once; what follows, and a
    batch of the loader, counts each list as one sample. The last of an epoch, and of a block after a `Filter`, may be
    shorter."""

    size: int

    def __post_init__(self) -> None:
        check_count("Batch: size", self.size, hint="Give the samples of one list.")

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.size

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

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.window

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        while window := list(islice(items, self.window)):
            for place in shuffled(len(window), calls.seed(window[0])):
                yield window[place]


def shuffled(length: int, seed: int) -> list[int]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    order: list[int] = torch.randperm(length, generator=generator, device="cpu").tolist()
    return order


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

    def failed(self, item: Item, error: Exception) -> object:
        what = f"sample {item.index} of {item.shard}: {type(error).__name__}: {error}"
        self.skipped += 1
        self.reports.append(what)
        refuse_to_skip(what, error, self.skipped, self.max_skipped, f"in lane {self.lane}")
        return SKIPPED


@dataclass(frozen=True, slots=True)
class StageCalls:
    """The calls of one transform in the list: two of them draw different numbers for the same sample."""

    calls: SampleCalls
    stage: int

    def __call__(self, function: Callable[[Any], Any], item: Item) -> Any:
        seed_cpu(self.seed(item))
        try:
            return function(item.value)
        except Exception as error:
            return self.calls.failed(item, error)

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


def refuse_unclear_policy(on_error: str, max_skipped: int | None) -> int:
    if on_error == "raise" and max_skipped is None:
        return 0
    if on_error == "skip" and isinstance(max_skipped, int) and max_skipped > 0:
        return max_skipped
    raise DataError(
        f"on_error={on_error!r} with max_skipped={max_skipped!r} does not say what to do with a broken sample. Use "
        'on_error="raise" alone, or on_error="skip" with max_skipped=, the number that may be skipped.'
    )


def refuse_to_skip(what: str, error: Exception, count: int, limit: int, where: str) -> None:
    """Raises if the broken sample, number `count`, exceeds the `limit` of skipped samples."""
    if limit == 0:
        raise DataError(
            f'{what}. Mend or leave out the sample, or skip such ones by on_error="skip" and max_skipped.'
        ) from error
    if count > limit:
        raise DataError(
            f"{what}. With it {count} samples would be skipped {where}, and max_skipped={limit}. Mend the data, or "
            "raise max_skipped."
        ) from error


class TransformedDataset(Dataset[Any]):
    """A map-style dataset seen through `Map`, `Filter`, `Batch` and `Shuffle`, in their order.

    Give it to a `DistributedDataLoader`, which seeds what functions draw by sample, or to a `Mixture` as a source. A
    `Filter` is computed once, here: it loads every sample. Give every rank the same `seed`.

    Args:
        dataset: Map-style.
        transforms: Applied in this order.
        on_error: Policy for a sample that cannot be loaded or whose function raises: "raise", or "skip": the next
            loadable sample replaces it, and it is counted and logged.
        max_skipped: With "skip", how many different samples may be skipped in one process (each worker is one).
        seed: Seed of the windows' orders, and of random draws in filters.

    Attributes:
        skipped: Numbers of samples that this process skipped.

    Raises:
        DataError: The dataset is empty or nothing of it is kept, a sample is broken, or a transform cannot be used
            here.
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Sequence[Transform],
        *,
        on_error: OnError = "raise",
        max_skipped: int | None = None,
        seed: int = 0,
    ) -> None:
        self._max_skipped = refuse_unclear_policy(on_error, max_skipped)
        self._dataset, self._name = dataset, type(dataset).__name__
        self._transforms, self._seed = list(transforms), seed
        self._lengths = [len(dataset)]  # samples before each transform, and behind the last one
        self._kept: dict[int, list[int]] = {}  # by filters, of the samples before them
        self._windows: dict[int, tuple[int, list[int]]] = {}  # of each shuffle the last window, and its order
        self.skipped: set[int] = set()
        for stage, transform in enumerate(transforms):
            self._lengths.append(self._length_behind(stage, transform))
        if len(self) == 0:
            raise DataError(f"Nothing of the dataset ({self._name}) is left by its transforms. Check its filters.")

    def __len__(self) -> int:
        return self._lengths[-1]

    def __getitem__(self, index: int) -> Any:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"Sample {index} of {length}.")
        for number in range(index, index + length):
            try:
                return self._load(len(self._transforms), number % length)
            except BrokenSampleError as broken:
                self._skip(broken)
        raise DataError(f"No sample of the dataset ({self._name}) can be loaded.")

    def _skip(self, broken: BrokenSampleError) -> None:
        what = f"sample {broken.index} of {self._name}: {type(broken.error).__name__}: {broken.error}"
        if self._max_skipped and broken.index not in self.skipped:
            self.skipped.add(broken.index)
            logger.warning("skipped %s (%d skipped in this process)", what, len(self.skipped))
        refuse_to_skip(what, broken.error, len(self.skipped), self._max_skipped, "in this process")

    def _length_behind(self, stage: int, transform: Transform) -> int:
        if isinstance(transform, Filter):
            self._kept[stage] = self._chosen(stage, transform)
            return len(self._kept[stage])
        if not isinstance(transform, Map | Batch | Shuffle):
            raise DataError(
                f"{type(transform).__name__} makes another number of samples of each, so they cannot be reached by "
                "number. Use it in a StreamLoader; documents of known lengths are packed by PackedRows."
            )
        return -(-self._lengths[stage] // (transform.size if isinstance(transform, Batch) else 1))

    def _chosen(self, stage: int, transform: Filter) -> list[int]:
        kept = []
        with preserved_random_state():
            for index in range(self._lengths[stage]):
                seed_cpu(hash_seed(b"sample", self._seed_of(stage), index))
                try:
                    if self._called(transform.function, self._load(stage, index), stage, index):
                        kept.append(index)
                except BrokenSampleError as broken:
                    self._skip(broken)
        return kept

    def _load(self, stage: int, index: int) -> Any:
        """Sample `index` as it comes to transform number `stage`; raises BrokenSampleError."""
        if stage == 0:
            return self._called(self._dataset.__getitem__, index, stage, index)
        before, transform, first = stage - 1, self._transforms[stage - 1], self._place_before(stage, index)
        if isinstance(transform, Batch):
            end = min(first + transform.size, self._lengths[before])
            return [self._load(before, place) for place in range(first, end)]
        sample = self._load(before, first)
        return self._called(transform.function, sample, stage, index) if isinstance(transform, Map) else sample

    def _called(self, function: Callable[[Any], Any], argument: Any, stage: int, index: int) -> Any:
        """The function's result; its errors name the sample of the user's dataset that this one is made of."""
        try:
            return function(argument)
        except Exception as error:
            for behind in range(stage, 0, -1):
                index = self._place_before(behind, index)
            raise BrokenSampleError(index, error) from error

    def _place_before(self, stage: int, index: int) -> int:
        """Index, before transform number `stage`, of sample `index` after it; the first of several."""
        before, transform = stage - 1, self._transforms[stage - 1]
        if isinstance(transform, Filter):
            return self._kept[before][index]
        if isinstance(transform, Batch):
            return index * transform.size
        if not isinstance(transform, Shuffle):
            return index
        window, place = divmod(index, transform.window)
        first = window * transform.window
        if before not in self._windows or self._windows[before][0] != window:
            size = min(transform.window, self._lengths[before] - first)
            self._windows[before] = window, shuffled(size, hash_seed(b"window", self._seed_of(before), window))
        return first + self._windows[before][1][place]

    def _seed_of(self, stage: int) -> int:
        return hash_seed(b"transform", self._seed, stage)


class BrokenSampleError(Exception):
    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(index, error)
        self.index, self.error = index, error
