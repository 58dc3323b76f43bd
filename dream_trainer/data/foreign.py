"""Iterating a loader that is not ours: its epoch, its random draws, its own state.

Such a loader decides the order by itself, often by drawing from the global generators. Those draws get a stream of
their own here, seeded per batch from (seed, epoch, batch, rank): training's random stream does not move, ranks draw
differently, and a pass that is replayed to resume in its middle comes out as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import count, islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_cpu


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that can say where it is, e.g. torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@runtime_checkable
class EpochAware(Protocol):
    """A sampler, dataset or loader whose order depends on an epoch it has to be told, e.g. `DistributedSampler`."""

    def set_epoch(self, epoch: int, /) -> Any: ...


def set_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tells the epoch to the loader and to each of its parts that wants to know.

    Args:
        loader: Any iterable of batches.
        epoch: Number of the pass that is about to begin.
    """
    parts: tuple[object, ...] = (loader,)
    if isinstance(loader, DataLoader):
        parts = (loader, loader.sampler, loader.batch_sampler, loader.dataset)
    for part in parts:
        if isinstance(part, EpochAware):
            part.set_epoch(epoch)


def iterate(loader: Iterable[Any], *, seed: int, epoch: int, dp_rank: int, first: int = 0) -> Iterator[Any]:
    """One pass over `loader`.

    A torch `DataLoader` (samplers, datasets without workers) draws from the global generators of this process and gets
    its own stream; it costs about 100 us for each batch. Any other iterable is iterated bare.

    Args:
        loader: Any iterable of batches.
        seed: The run's seed.
        epoch: Number of the pass.
        dp_rank: This rank among the data-parallel ones.
        first: Number of the batch within the pass that comes first, for a loader that was put there by its own state.
    """
    if isinstance(loader, DataLoader):
        return _seeded_batches(loader, seed, epoch, dp_rank, first)
    return iter(loader)


def known_length(loader: object) -> int | None:
    """Number of batches in a pass, where the loader knows it."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a DataLoader has __len__ even over a dataset that has none
        return None


def _seeded_batches(loader: DataLoader[Any], seed: int, epoch: int, dp_rank: int, first: int) -> Iterator[Any]:
    with preserved_random_state():
        seed_cpu(hash_seed(b"pass", seed, epoch, dp_rank))
        batches = iter(loader)
        # A sampler draws its order with the first batch, or already in `iter` where the loader's own state has it
        # replayed: one stream for both makes the orders equal.
        opening = list(islice(batches, 1)) if first == 0 else []
    yield from opening
    if first == 0 and not opening:
        return
    for number in count(first + len(opening)):
        with preserved_random_state():
            seed_cpu(hash_seed(b"batch", seed, epoch, number, dp_rank))
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch
