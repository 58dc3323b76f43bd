"""The random draws of a loader that is used as it is, apart from training's.

Seeding all generators for each batch takes 10 us and would be for nothing with most loaders. torch's is seeded in 1 us,
so it is for every batch. python's takes 6 and numpy's 2: they are seeded for every batch that follows their first draw
in a pass. Up to that draw they stand at the start of the pass's own stream, to which their bytes are put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
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

from dream_trainer.compat.generator_bytes import (
    numpy_global,
    numpy_mark,
    numpy_memory,
    python_mark,
    python_state,
    set_python_state,
    torch_state,
)
from dream_trainer.data.sample_seeds import collates_without_draws, draws_nothing
from dream_trainer.distributed.seeds import outside, preserved_random_state, put_back, seed_cpu


class PassDraws:
    """The global generators during one pass, inside the block `apart`.

    Args:
        drawn: Its `drawn`, where the pass was interrupted.

    Attributes:
        drawn: Of python and numpy, those that were drawn from in this pass; torch, if the pass's first batch drew.
    """

    def __init__(self, drawn: Iterable[str]) -> None:
        self.drawn = set(drawn)
        self._numpy_global = numpy_global(np)
        self._set_numpy: Any = np.random.set_bit_generator  # type: ignore[attr-defined]  # its types leave it out
        self._numpy = np.random.MT19937(0)
        self._numpy_mark = numpy_mark(numpy_memory(self._numpy))
        # Inside, the pass draws; training's generators are put back at the end.
        self.apart = preserved_random_state(numpy_generator=self._numpy)

    def begin(self, seed: int) -> None:
        """Begins the pass's own stream."""
        seed_cpu(seed)
        self._torch_start, self._python_start = torch_state.raw, python_state()
        self._marks = python_mark(), self._numpy_mark.raw

    def seed_batch(self, seed: int) -> None:
        """Seeds the generators that a batch may draw from; the others go to the start of the pass's stream."""
        set_python_state(self._python_start)
        seed_cpu(seed, self.drawn | {"torch"} if self.drawn else ("torch",))

    def load_apart(self, batches: Iterator[Any], seed: int) -> Any:
        """The next of `batches`, seeded by `seed`, inside `apart`."""
        if self.drawn or outside.states is not None:
            with self.apart:
                self.seed_batch(seed)
                return self.load(batches)
        # The same written flat, for loaders that draw from torch's at most: as it runs between two steps, each call
        # of a function takes some 2 us, and all of them would take as long as what they do.
        states = torch_state.raw, python_state(), self._numpy_global._bit_generator
        try:
            outside.states, outside.depth = states, 1
            self._set_numpy(self._numpy)
            set_python_state(self._python_start)
            default_generator.manual_seed(seed & 0xFFFF_FFFF)
            return next(batches)
        finally:
            try:
                if python_mark() != self._marks[0] or self._numpy_mark.raw != self._marks[1]:
                    self.notice()
                put_back(states)
            except BaseException:  # a signal that ends a wait for data may come just here, once
                put_back(states)
                raise
            finally:
                outside.states, outside.depth = None, 0

    def load(self, batches: Iterator[Any]) -> Any:
        """The next of `batches`, inside `apart`; sees what was drawn from since `begin` or `seed_batch`."""
        try:
            return next(batches)
        finally:
            self.notice()

    def notice(self) -> None:
        """Sees whether python's and numpy's were drawn from since `begin` or `seed_batch`."""
        of_python, of_numpy = self._marks
        if python_mark() != of_python:
            self.drawn.add("python")
        if self._numpy_mark.raw != of_numpy:
            self.drawn.add("numpy")

    def notice_order(self) -> None:
        """Sees whether torch's was drawn from in the pass's first batch, as an order is."""
        if torch_state.raw != self._torch_start:
            self.drawn.add("torch")


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
