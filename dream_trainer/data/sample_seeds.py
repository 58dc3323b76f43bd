"""Random draws made while loading data: seeded again for each sample from (seed, epoch, index). Samples that are loaded
in the training process leave its own generators as they were."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import (
    ConcatDataset,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from dream_trainer.data.ordered import OrderedDataset
from dream_trainer.data.sampler import BatchKey, sample_seed
from dream_trainer.distributed.seeds import GENERATORS, WatchedSeeds, preserved_random_state, seed_cpu


@runtime_checkable
class BatchedDataset(Protocol):
    def __getitems__(self, indices: list[int], /) -> Any: ...


def draws_nothing(dataset: object) -> bool:
    """Whether loading from `dataset` is known to make no random draw."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, list, tuple, range)


def collates_without_draws(collate_fn: object) -> bool:
    return collate_fn is default_collate or collate_fn is default_convert


def loads_batches(dataset: object) -> bool:
    """Whether `dataset` has its own `__getitems__`; `Subset`'s only loops if what it wraps has none."""
    return loads_batches(dataset.dataset) if type(dataset) is Subset else isinstance(dataset, BatchedDataset)


class KeyedDataset(Dataset[Any]):
    """Loads and collates one batch, given as (epoch, indices), from the user's map-style dataset."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], seed: int | None) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.seed = None if draws_nothing(dataset) and collates_without_draws(collate_fn) else seed
        self.is_batched = loads_batches(dataset)
        self.is_ordered = isinstance(dataset, OrderedDataset)
        self._drawn: set[str] | None = None
        self._watched: WatchedSeeds | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, key: BatchKey) -> Any:
        """Result of `load`, with an OrderedDataset's mark; `DataLoader` calls this method."""
        batch = self.load(key)
        return (batch, self.dataset.mark()) if self.is_ordered else batch

    def load(self, key: BatchKey) -> Any:
        if self.seed is None:
            _, indices = key
            return self.collate_fn(
                self.dataset.__getitems__(indices) if self.is_batched else [self.dataset[i] for i in indices]
            )
        if get_worker_info() is not None:
            return self._load_seeded(key, self.seed)
        with preserved_random_state():
            return self._load_seeded(key, self.seed)

    def _load_seeded(self, key: BatchKey, seed: int) -> Any:
        epoch, indices = key
        if self.is_batched:
            seed_cpu(sample_seed(seed, epoch, indices[0]))
            return self.collate_fn(self.dataset.__getitems__(indices))
        if self._drawn is None:
            return self._load_first(epoch, indices, seed)
        if self._drawn == GENERATORS:
            return self._load(epoch, indices, seed, GENERATORS)
        self._watched = self._watched or WatchedSeeds(seed)
        while True:
            others = GENERATORS - self._drawn
            self._watched.seed(others)
            batch = self._load(epoch, indices, seed, self._drawn)
            more = self._watched.drawn(others)
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
        return batch

    def _load(self, epoch: int, indices: list[int], seed: int, generators: Collection[str]) -> Any:
        if not generators:
            return self.collate_fn([self.dataset[index] for index in indices])
        samples = []
        for index in indices:
            seed_cpu(sample_seed(seed, epoch, index), generators)
            samples.append(self.dataset[index])
        return self.collate_fn(samples)
