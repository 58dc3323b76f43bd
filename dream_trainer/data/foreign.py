"""Iterating a loader that is not ours: its epoch, its random draws, its own state. Its draws from the global
generators get their own stream, by (seed, epoch, batch, rank), so training's stream does not move and a replayed
pass is the same."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch import default_generator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dream_trainer.compat.pytorch import shutdown_workers
from dream_trainer.data.sampler import collates_without_draws, draws_nothing
from dream_trainer.data.worker_start import workers_start
from dream_trainer.distributed.seeds import GENERATORS, WatchedSeeds, hash_seed, preserved_random_state, seed_cpu


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that can say where it is, e.g. torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@runtime_checkable
class EpochAware(Protocol):
    """A sampler, dataset or loader whose order depends on the epoch passed to it, e.g. `DistributedSampler`."""

    def set_epoch(self, epoch: int, /) -> Any: ...


def set_epoch(loader: Iterable[Any], epoch: int) -> None:
    parts: tuple[object, ...] = (loader,)
    if isinstance(loader, DataLoader):
        parts = (loader, loader.sampler, loader.batch_sampler, loader.dataset)
    for part in parts:
        if isinstance(part, EpochAware):
            part.set_epoch(epoch)


@dataclass(eq=False, repr=False)
class SeededPass:
    """One pass over a loader that may draw from the global generators. Its first batch draws from the pass's streams,
    and each later one from its own; training's streams are set aside once for each `take`, unless no batch draws."""

    loader: Iterable[Any]
    _: KW_ONLY
    seed: int
    epoch: int
    dp_rank: int
    first: int = 0
    draws: bool | None = True  # whether batches after the first draw, as seen so far; not looked at once it is True
    drawn: Iterable[str] = ()  # the generators that the pass's first batch drew from, as an order is

    def __post_init__(self) -> None:
        self.drawn = sorted(self.drawn)  # plain data of a checkpoint
        self._next = self.first
        self._batches: Iterator[Any] | None = None
        self._is_quiet = draws_at_start_only(self.loader)
        self._apart = preserved_random_state()

    def __iter__(self) -> Iterator[Any]:
        while batches := self.take(1):
            yield from batches

    def take(self, number: int) -> list[Any]:
        """The next batches, fewer at the end of the pass."""
        if self._batches is not None and self._is_quiet:
            return list(islice(self._batches, number))
        taken: list[Any] = []
        with self._apart:
            while len(taken) < number and (loaded := self._load()):
                taken += loaded
                self._next += 1
        return taken

    def _load(self) -> list[Any]:
        if self._batches is None:
            return self._load_first()
        if not self._is_quiet and self.draws:
            seed_cpu(self._seed_of_batch())
        seeds = None if self._is_quiet or self.draws else WatchedSeeds(self._seed_of_batch())
        batch = list(islice(self._batches, 1))
        if seeds is not None:
            self.draws = bool(seeds.drawn())
        return batch

    def _load_first(self) -> list[Any]:
        numbers = self.seed, self.epoch, self.dp_rank
        start = WatchedSeeds(hash_seed(b"pass", *numbers))
        with workers_start(self.loader, hash_seed(b"workers", *numbers)):
            self._batches = iter(self.loader)
        # If its own state moved a loader into the middle of a pass, it redraws either the whole order, which needs the
        # pass's stream, or only the batch's values. Its earlier draws tell which.
        if self.first > 0:
            seed_cpu(self._seed_of_batch(), GENERATORS if self.draws else GENERATORS.difference(self.drawn))
        batch = list(islice(self._batches, 1))
        if batch and self.first == 0:
            self.drawn = sorted(start.drawn())
        return batch

    def _seed_of_batch(self) -> int:
        return hash_seed(b"batch", self.seed, self.epoch, self._next, self.dp_rank)

    def close(self) -> None:
        shutdown_workers(self._batches)


def keeps_what_it_draws(loader: object, *, draws: bool | None) -> bool:
    """Whether the loader's own state restores its position exactly, random draws included."""
    if draws is None:
        return False
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset):
            return isinstance(loader.dataset, StatefulLoader) or loader.num_workers > 0
        return isinstance(loader.batch_sampler, BatchSampler | StatefulLoader) or loader.batch_sampler is None
    nodes = sys.modules.get("torchdata.nodes")
    return nodes is None or not isinstance(loader, nodes.Loader) or not draws


def draws_at_start_only(loader: object) -> bool:
    """Whether batches after a pass's first are known to draw nothing in this process."""
    if type(loader) in (list, tuple, range):
        return True
    if type(loader) is not DataLoader:
        return False
    if loader.num_workers == 0 and not (draws_nothing(loader.dataset) and collates_without_draws(loader.collate_fn)):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return True
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return False
    sampler = loader.sampler if batches is None else batches.sampler
    if type(sampler) is RandomSampler:
        return sampler.generator is not default_generator
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
