"""The random draws of a loader that is used as it is, apart from training's.

torch's generator is seeded for every batch; python's and numpy's for every batch that follows their first draw in a
pass. Up to that draw they stand at the start of the pass's own stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

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

from dream_trainer.data.sample_seeds import collates_without_draws, draws_nothing
from dream_trainer.distributed.seeds import WatchedSeeds, preserved_random_state, seed_cpu


class PassDraws:
    """The global generators during one pass, inside the block `apart`.

    Args:
        drawn: Its `drawn`, where the pass was interrupted.

    Attributes:
        drawn: Of python and numpy, those that were drawn from in this pass; torch, if the pass's first batch drew.
        apart: Inside, the pass draws; training's generators are put back at the end.
    """

    def __init__(self, drawn: Iterable[str]) -> None:
        self.drawn = set(drawn)
        self.apart = preserved_random_state()

    def begin(self, seed: int) -> None:
        """Begins the pass's own stream."""
        self._start = WatchedSeeds(seed)

    def seed_batch(self, seed: int) -> None:
        """Seeds the generators that a batch may draw from; the others go to the start of the pass's stream."""
        self._start.seed({"python", "numpy"} - self.drawn)
        seed_cpu(seed, self.drawn | {"torch"})

    def load_apart(self, batches: Iterator[Any], seed: int) -> Any:
        """The next of `batches`, seeded by `seed`, inside `apart`."""
        with self.apart:
            self.seed_batch(seed)
            return self.load(batches)

    def watch(self, batches: Iterator[Any], seed: int) -> tuple[Any, bool]:
        """As `load_apart`; also whether the batch drew."""
        with self.apart:
            watched = self.drawn | {"torch"}
            self._start.seed({"python", "numpy"} - watched)
            seeds = WatchedSeeds(seed, watched)
            n_drawn = len(self.drawn)
            batch = self.load(batches)
            return batch, len(self.drawn) > n_drawn or bool(seeds.drawn())

    def load(self, batches: Iterator[Any]) -> Any:
        """The next of `batches`, inside `apart`; sees what was drawn from since `begin` or `seed_batch`."""
        try:
            return next(batches)
        finally:
            self.notice()

    def notice(self) -> None:
        """Sees whether python's and numpy's were drawn from since `begin` or `seed_batch`; draws from them."""
        self.drawn |= self._start.drawn({"python", "numpy"} - self.drawn)

    def notice_order(self) -> None:
        """Sees whether torch's was drawn from in the pass's first batch, as an order is."""
        self.drawn |= self._start.drawn({"torch"})


def draws_at_start_only(loader: object) -> bool:
    """Whether batches after a pass's first are known to draw nothing in this process: their samples are tensors or come
    from workers, and a sampler of torch's draws the order, or the seed of its own generator, when it begins."""
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
