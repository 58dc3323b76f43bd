"""What is done to samples of a stream, in order: map, filter, batch, unbatch, shuffle. They work on blocks that carry
nothing over, so a place is the source's state at a block's start and a number of samples."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import islice
from typing import Any, Literal

import torch

from dream_trainer.checks import check_count
from dream_trainer.distributed.seeds import hash_seed, seed_cpu
from dream_trainer.errors import DataError

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
    """One step of what is done to samples."""

    block = 1  # a block of samples is a multiple of this

    @abstractmethod
    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        """The samples of one block, transformed."""


@dataclass(frozen=True)
class Map(Transform):
    """Replaces each sample by `function(sample)`. What it draws from `random`, NumPy and torch is seeded by sample."""

    function: Callable[[Any], Any]

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        for item in items:
            value = calls(self.function, item)
            if value is not SKIPPED:
                yield Item(value, item.number, item.shard, item.index)


@dataclass(frozen=True)
class Filter(Transform):
    """Keeps the samples for which `function(sample)` is true."""

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
    """Makes each item of a list a sample of its own, e.g. of what a tokenizer made of a `Batch`."""

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
    on_error: OnError
    max_skipped: int
    skipped: int = 0
    reports: list[str] = field(default_factory=list)

    def transformed(self, transforms: Sequence[Transform], items: Iterator[Item]) -> Iterator[Item]:
        for stage, transform in enumerate(transforms):
            items = transform.over(items, StageCalls(self, stage))
        return items

    def failed(self, item: Item, error: Exception) -> object:
        what = f"sample {item.index} of {item.shard}: {type(error).__name__}: {error}"
        if self.on_error == "raise":
            raise DataError(
                f'{what}. Mend or leave out the sample, or skip such ones by on_error="skip" and max_skipped.'
            ) from error
        self.skipped += 1
        self.reports.append(what)
        if self.skipped > self.max_skipped:
            raise DataError(
                f"{what}. With it lane {self.lane} would skip {self.skipped} samples, and "
                f"max_skipped={self.max_skipped} of each lane may be. Mend the data, or raise max_skipped."
            ) from error
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
    """A transform and its plain options, which decide what samples come; functions are not told apart."""
    options: dict[str, Any] = vars(transform) if is_dataclass(transform) else {}
    told = [f"{name}={value!r}" for name, value in options.items() if value is None or isinstance(value, int | str)]
    return f"{type(transform).__name__}({', '.join(told)})"


def block_size(transforms: Sequence[Transform]) -> int:
    """Samples in a block: a multiple of what each transform takes at once."""
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
