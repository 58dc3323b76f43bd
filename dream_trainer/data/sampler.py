"""The part of each epoch that one data-parallel rank loads, as arithmetic. An epoch is cut into chunks of `batch_size *
dp_size` positions, whatever the accumulation; rank `r` takes the `r`-th slice of each. A last, smaller chunk is split
evenly.

Some datasets decide their order themselves: mixtures, and rows packed from documents. All ranks together consume
sample `p` as the `p`-th, so a step's samples follow from its position, and only numbers go to workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Sampler, Subset, TensorDataset, default_collate, default_convert

from dream_trainer.distributed.seeds import GENERATORS, WatchedSeeds, hash_seed, seed_cpu, watched_random_state
from dream_trainer.errors import DataError

ENDLESS = 2**62  # the length of a dataset that never ends


class OrderedDataset(Dataset[Any], ABC):
    """A map-style dataset whose samples are numbered in the order of consumption.

    Give it to a `DistributedDataLoader` with `shuffle=False`. Within a pass (all positions of one length) a sample must
    be a pure function of its position and the arguments of `begin` and `set_epoch`. Any process may request any
    position, in any order. Rising positions should be cheap.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Samples in a pass; ENDLESS if it never ends."""

    @abstractmethod
    def __getitem__(self, position: int) -> Any:
        """The sample at a position of the pass."""

    @abstractmethod
    def begin(self, seed: int, state: dict[str, Any] | None) -> None:
        """Called before anything is read, at the start of each pass (`state` None) and before a resume in its middle.

        `state` is the result of `state_at` for the position to resume at; raises DataError if it belongs to other data.
        Without `state`, a change made by the running program (a mixture's weights) stays.
        """

    @abstractmethod
    def state_at(self, position: int, mark: Any = None) -> dict[str, Any]:
        """Plain data that `begin` needs to resume at `position` of this pass, and the counts of drawn samples.

        Called when a checkpoint is written, on any rank. `mark` is the newest that this rank had loaded before.
        """

    def set_epoch(self, epoch: int) -> None:  # most have nothing to do
        """Receives the number of the pass, from 0, after `begin`. A dataset that reads another one passes it on."""

    def mark(self) -> Any:
        """A small plain value about the last loaded sample; workers send it with their batch. None if unused."""
        return None

    @property
    def first_position(self) -> int:
        """The earliest available position of this pass: above 0 if a run resumed with other data."""
        return 0

    @property
    def may_change(self) -> bool:
        """Whether to call `changes_at` before a window; this check must be cheap."""
        return True

    def changes_at(self, position: int, mark: Any = None) -> bool:
        """Whether the order from `position` on has changed. Asked between two windows; all ranks return the same. After
        a change, prefetched samples are dropped and `begin` is called with the state at `position`."""
        return False

    def stages_within(self, first: int, last: int) -> list[int]:
        """Rising positions between `first` and `last`, both excluded, where the weights of samples change."""
        return []

    def lengths(self, first: int, last: int, /) -> Any:
        """Tokens of the samples at positions `first` to `last` (exclusive): integers, shape `(last - first,)`. Packed
        and padded rows need them; raises DataError by default."""
        raise DataError(
            f"{type(self).__name__} has no `lengths(first, last)`, by which rows are planned. Write the documents into "
            "token files (`dream-trainer data tokenize`), or give each source its lengths."
        )

    def numbers_at(self, position: int, mark: Any = None) -> Mapping[str, float]:
        """Named numbers to log at `position`; arguments as in `state_at`."""
        return {}

    @property
    def source(self) -> OrderedDataset | None:
        """The ordered dataset that this one reads, if it reads one."""
        return None


def innermost(dataset: OrderedDataset) -> OrderedDataset:
    """The dataset that decides the order in the end: of rows, their documents."""
    while (source := dataset.source) is not None:
        dataset = source
    return dataset


# (epoch, indices): one batch of one rank, and all that its samples' random draws depend on
BatchKey = tuple[int, list[int]]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How samples are dealt to ranks: `batch_size` per micro-batch to each of `dp_size` ranks, seen from `dp_rank`."""

    batch_size: int
    dp_rank: int
    dp_size: int

    @property
    def chunk_size(self) -> int:
        """Samples in one micro-batch of all ranks together."""
        return self.batch_size * self.dp_size

    def slice_of_chunk(self, size: int) -> tuple[int, int]:
        """Offset and length of this rank's part of a chunk of `size` samples; uneven, the first ranks take one more."""
        share, extra = divmod(size, self.dp_size)
        return self.dp_rank * share + min(self.dp_rank, extra), share + (self.dp_rank < extra)

    def samples_in(self, number: int, samples: int) -> int:
        return self.slice_of_chunk(min(self.chunk_size, samples - number * self.chunk_size))[1]


class RankBatchSampler(Sampler[BatchKey]):
    """Yields this rank's batches of one pass, each as (epoch, indices)."""

    def __init__(self, length: int, sharding: Sharding, *, seed: int, shuffle: bool) -> None:
        self.length = length
        self.sharding = sharding
        self.seed = seed
        self.shuffle = shuffle
        # What the next iterator yields: the positions from the second to the third (exclusive) of an epoch's order.
        self.next_pass: tuple[int, int, int] = (0, 0, length)

    def __iter__(self) -> Iterator[BatchKey]:
        # Not a generator itself: the pass is the one that is set now, not when the first batch is drawn.
        epoch, first, end = self.next_pass
        return ((epoch, indices) for indices in self.indices(epoch, first, end))

    def indices(self, epoch: int, first: int, end: int) -> Iterator[list[int]]:
        """This rank's batches of those positions; does not change the next iterator."""
        sharding = self.sharding
        num_full, last_chunk = divmod(end - first, sharding.chunk_size)
        last = first + num_full * sharding.chunk_size
        offset, size = sharding.slice_of_chunk(last_chunk)
        own = [(last + offset, last + offset + size)] if size else []
        starts = range(first + sharding.dp_rank * sharding.batch_size, last, sharding.chunk_size)
        order = epoch_order(self.seed, epoch, self.length).numpy() if self.shuffle else None
        for begin, stop in chain(((start, start + sharding.batch_size) for start in starts), own):
            # An order that is not shuffled may be endless.
            yield list(range(begin, stop)) if order is None else order[begin:stop].tolist()


# the epoch that validation samples are seeded with: the same augmentation each time, and none that training has
VALIDATION_EPOCH = -1


# Nothing of these depends on the world size, the workers or earlier draws, so any rank can compute any epoch's order.


def random_order(length: int, seed: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def epoch_order(seed: int, epoch: int, length: int) -> Tensor:
    return random_order(length, hash_seed(b"order", seed, epoch))


def sample_seed(seed: int, epoch: int, index: int) -> int:
    return hash_seed(b"sample", seed, epoch, index)


# -- Random draws made while loading data, seeded again for each sample from (seed, epoch, index).


def draws_nothing(dataset: object) -> bool:
    """Whether loading from `dataset` is known to make no random draw."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, list, tuple, range)


def collates_without_draws(collate_fn: object) -> bool:
    return collate_fn is default_collate or collate_fn is default_convert


@runtime_checkable
class BatchedDataset(Protocol):
    def __getitems__(self, indices: list[int], /) -> Any: ...


def loads_batches(dataset: object) -> bool:
    """Whether `dataset` has its own `__getitems__`; `Subset`'s only loops if what it wraps has none."""
    return loads_batches(dataset.dataset) if type(dataset) is Subset else isinstance(dataset, BatchedDataset)


class KeyedDataset(Dataset[Any]):
    """Loads and collates one batch, given as (epoch, indices), from the user's map-style dataset. Inside `apart`, since
    it draws from the global generators; a worker's batches each enter it themselves."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], seed: int) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.seed = None if draws_nothing(dataset) and collates_without_draws(collate_fn) else seed
        self.is_batched = loads_batches(dataset)
        self.is_ordered = isinstance(dataset, OrderedDataset)
        self._drawn: set[str] | None = None
        self._streams = watched_random_state()

    @property
    def apart(self) -> AbstractContextManager[None]:
        """Sets training's random streams aside for any number of batches, unless none of them draws."""
        return nullcontext() if self.seed is None else self._streams

    def __getitems__(self, key: BatchKey) -> Any:
        """Result of `load`, with an OrderedDataset's mark; `DataLoader` calls this method."""
        if self.seed is not None and not self._streams.is_inside:
            with self._streams:
                return self.__getitems__(key)
        batch = self.load(key)
        return (batch, self.dataset.mark()) if self.is_ordered else batch

    def load(self, key: BatchKey) -> Any:
        epoch, indices = key
        if self.is_batched:
            if self.seed is not None:
                seed_cpu(sample_seed(self.seed, epoch, indices[0]))
            return self.collate_fn(self.dataset.__getitems__(indices))
        if self.seed is None:
            return self._load(epoch, indices, 0, ())
        if self._drawn is None:
            return self._load_first(epoch, indices, self.seed)
        while True:
            batch = self._load(epoch, indices, self.seed, self._drawn)
            more = self._streams.drawn(GENERATORS - self._drawn)
            if not more:
                return batch
            self._drawn |= more

    def _load_first(self, epoch: int, indices: list[int], seed: int) -> Any:
        """Loads a batch with all generators seeded, and sees which of them are drawn from."""
        self._drawn = set()
        samples, seeds = [], None
        for index in indices:
            if seeds is not None:
                self._drawn |= seeds.drawn()
            seeds = WatchedSeeds(sample_seed(seed, epoch, index))
            samples.append(self.dataset[index])
        batch = self.collate_fn(samples)  # which draws from the last sample's stream
        if seeds is not None:
            self._drawn |= seeds.drawn()
        self._streams.begin_again()
        return batch

    def _load(self, epoch: int, indices: list[int], seed: int, generators: Collection[str]) -> Any:
        if not generators:
            return self.collate_fn([self.dataset[index] for index in indices])
        samples = []
        for index in indices:
            seed_cpu(sample_seed(seed, epoch, index), generators)
            samples.append(self.dataset[index])
        return self.collate_fn(samples)
