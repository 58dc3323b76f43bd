"""The loaders that users hand to the trainer: ours, plain ones rebuilt as ours, and per-rank ones. A plain `DataLoader`
cannot resume, so one in sequential or random order becomes a `DistributedDataLoader`; any other serves one data-
parallel rank as it is."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import islice, takewhile
from multiprocessing.context import BaseContext
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from dream_trainer.checks import check_count, refuse
from dream_trainer.compat.pytorch import shutdown_workers
from dream_trainer.data.lane_stream import StreamLoader
from dream_trainer.data.loader_groups import AlternatingLoaders, LoaderGroup
from dream_trainer.data.sampler import KeyedDataset, OrderedDataset, RankBatchSampler, Sharding
from dream_trainer.data.worker_start import started, worker_loader, worker_options
from dream_trainer.distributed.ranks import plain_facts
from dream_trainer.distributed.seeds import hash_seed
from dream_trainer.errors import DataError


@dataclass(eq=False, repr=False)
class DistributedDataLoader:
    """A `DataLoader` over a map-style dataset that serves each rank its own part and resumes at any sample.

    The same samples with the same augmentation make up each optimizer step at any world size, accumulation and number
    of workers: `random`, numpy and torch are seeded before each sample. The trainer passes it rank and seed; without a
    trainer it yields the first epoch as a single process sees it.

    Args:
        dataset: Map-style: `__getitem__` and `__len__`. An OrderedDataset, such as a Mixture, decides its order.
        batch_size: Samples in one micro-batch of one rank.
        shuffle: Whether each epoch has a different random order, from the trainer's seed. Validation is always in the
            dataset's order.
        drop_last: Whether training drops the samples at an epoch's end that do not fill a global batch. With False they
            are split evenly over the ranks, to sizes differing by at most one; pass `weight=` to `backward` then, so
            that each sample counts the same. Validation never drops any.
        num_workers: Processes that load ahead; 0 loads in the training process.
        collate_fn: Turns a list of samples into a batch.
        pin_memory: Whether batches are copied to page-locked memory, for asynchronous copies to a GPU.
        persistent_workers: Whether workers outlive an epoch.
        prefetch_factor: Batches that each worker loads ahead; torch's default is 2.
        multiprocessing_context: "fork", "spawn", "forkserver" or a context object.
        timeout: Seconds to wait for a batch from a worker. 0 waits forever.
        worker_init_fn: Called with the worker's number when it starts.

    Raises:
        DataError: The dataset is not map-style or empty, `batch_size` is not a positive integer, or an OrderedDataset
            would be shuffled.
    """

    dataset: Any
    batch_size: int = 1
    _: KW_ONLY
    shuffle: bool = False
    drop_last: bool = True
    num_workers: int = 0
    collate_fn: Callable[[Any], Any] | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: str | BaseContext | None = None
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        name = type(self.dataset).__name__
        if isinstance(self.dataset, IterableDataset) or not isinstance(self.dataset, Sized):
            raise DataError(
                f"{name} has no length and no samples by number, so it cannot be dealt to ranks. Give a dataset with "
                "`__len__` and `__getitem__`, or let it yield each rank's part and wrap its loader in PerRankLoader."
            )
        check_count("batch_size", self.batch_size, hint="Give the samples of one rank's micro-batch.")
        is_empty = len(self.dataset) == 0
        refuse(is_empty, f"The dataset ({name}) has 0 samples. Check its path, split and filters.", DataError)
        if self.shuffle and isinstance(self.dataset, OrderedDataset):
            raise DataError(f"shuffle=True, and the dataset ({name}) decides its order itself. Use shuffle=False.")

    def __iter__(self) -> Iterator[Any]:
        reader = ShardReader(self, Sharding(self.batch_size, 0, 1), seed=0, shuffle=self.shuffle)
        return reader.batches(0, 0, self._single_process_end())

    def __len__(self) -> int:
        """Batches of one epoch in a single process."""
        return math.ceil(self._single_process_end() / self.batch_size)

    def _single_process_end(self) -> int:
        length = len(self.dataset)
        return length - length % self.batch_size if self.drop_last else length


class PerRankLoader:
    """Declares that `loader` already yields this rank's own batches, different ones on each rank.

    The trainer then uses it as it is at any world size. It needs no length, and ranks may have different numbers of
    batches: training ends for all of them with the last window that each can fill.

    Args:
        loader: Any iterable of batches that can be iterated once per epoch.

    Raises:
        DataError: It is a loader that deals samples to ranks itself.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if isinstance(loader, (DistributedDataLoader, StreamLoader, PerRankLoader)):
            raise DataError(f"A {type(loader).__name__} is made for several ranks already. Use it as it is.")
        self.loader = loader


class ShardReader:
    """Reads one rank's part of a DistributedDataLoader's passes through torch's `DataLoader`, from any sample on."""

    def __init__(self, loader: DistributedDataLoader, sharding: Sharding, *, seed: int, shuffle: bool) -> None:
        self.seed = seed
        self.loader = loader
        self.keyed_dataset = KeyedDataset(loader.dataset, loader.collate_fn or default_collate, seed)
        self.sampler = RankBatchSampler(len(loader.dataset), sharding, seed=seed, shuffle=shuffle)
        # Without its own generator, DataLoader draws its workers' base seed from the global one, and so would move the
        # training process's random stream at each epoch (and at each resume).
        self.generator = torch.Generator(device="cpu")
        self._torch_loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self.ordered = loader.dataset if isinstance(loader.dataset, OrderedDataset) else None
        self.marks: deque[tuple[int, Any]] = deque()  # of an OrderedDataset, with the ends of their batches
        self.begin(0, None)

    def begin(self, epoch: int, state: dict[str, Any] | None) -> None:
        """Makes an OrderedDataset begin pass `epoch`, or resume in it from `state`. Prefetched samples are dropped."""
        self.marks.clear()
        if self.ordered is not None:
            self.ordered.begin(self.seed, state)
            self.ordered.set_epoch(epoch)
            self.dataset_changed()

    def batches(self, epoch: int, first: int, end: int) -> Iterator[Any]:
        """This rank's batches of the positions from `first` up to `end` in `epoch`'s order. Ends those before."""
        self.start(epoch, first, end)
        while batches := [*self.take(1)]:
            yield from batches

    def take(self, number: int) -> Iterator[Any]:
        """The next batches of those that were started, fewer at their end; loaded all at once with the first."""
        with self.keyed_dataset.apart if self.loader.num_workers == 0 else nullcontext():
            loaded = [*islice([] if self._iterator is None else self._iterator, number)]
        for batch in loaded:
            if self.ordered is not None:
                batch, mark = batch
                self._end += self.sampler.sharding.chunk_size
                if mark is not None:
                    self.marks.append((self._end, mark))
            yield batch

    def start(self, epoch: int, first: int, end: int) -> None:
        """Starts to load what `batches` says."""
        if self._torch_loader is None:
            self._torch_loader = worker_loader(
                self.keyed_dataset,
                self.loader,
                self.generator,
                batch_sampler=self.sampler,  # what it yields goes to KeyedDataset as it is
                persistent_workers=self.loader.persistent_workers,
            )
        self.release()
        self.sampler.next_pass = epoch, first, end
        self.generator.manual_seed(hash_seed(b"workers", self.seed, epoch, first, self.sampler.sharding.dp_rank))
        self._iterator, self._end = started(self._torch_loader), first

    def newest_mark(self, position: int) -> Any:
        """The mark of the last batch that ends at or before `position`; or None."""
        return next((mark for end, mark in reversed(self.marks) if end <= position), None)

    def forget_marks_before(self, position: int) -> None:
        while len(self.marks) > 1 and self.marks[1][0] <= position:
            self.marks.popleft()

    @property
    def facts(self) -> dict[str, Any]:
        loader = self.loader
        order = {} if self.ordered is None else plain_facts("order", self.ordered.state_at(0))
        return order | {
            "samples": len(loader.dataset),
            "batch size": loader.batch_size,
            "shuffle": loader.shuffle,
            "drop_last": loader.drop_last,
        }

    def dataset_changed(self) -> None:
        """Makes the next pass read the dataset as it is now: persistent workers hold an earlier copy."""
        self.sampler.length = len(self.loader.dataset)
        if self.loader.persistent_workers:
            self.close()

    @property
    def is_started(self) -> bool:
        return self._iterator is not None

    def release(self) -> None:
        self._iterator = None  # whose worker processes live for as long as something refers to it

    def close(self) -> None:
        shutdown_workers(self._iterator)
        self.release()
        self._torch_loader = None


def rebuild(loader: object) -> DistributedDataLoader | None:
    """A plain `DataLoader` as ours, with all its options; None if its order or its code is the user's."""
    if not isinstance(loader, DataLoader) or _has_own_methods(loader):
        return None
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        return None
    if not isinstance(batches, BatchSampler) or _is_own(type(batches)):
        return None
    if (shuffle := _shuffles(batches.sampler, len(loader.dataset))) is None:
        return None
    return DistributedDataLoader(
        loader.dataset,
        batches.batch_size,
        shuffle=shuffle,
        drop_last=batches.drop_last,
        collate_fn=loader.collate_fn,
        persistent_workers=loader.persistent_workers,
        **worker_options(loader),
    )


def loader_batch_size(loader: object) -> int | None:
    """Samples in one of the loader's batches, if it has a fixed batch size; for a group, the sum over its loaders."""
    if isinstance(loader, PerRankLoader):
        return loader_batch_size(loader.loader)
    if isinstance(loader, LoaderGroup | Mapping):
        sizes = [loader_batch_size(one) for one in training_loaders(loader).values()]
        if isinstance(loader, AlternatingLoaders):
            return sizes[0] if len(set(sizes)) == 1 else None
        return None if None in sizes else sum(size or 0 for size in sizes)
    if isinstance(loader, DistributedDataLoader | StreamLoader):
        return loader.batch_size
    if isinstance(loader, DataLoader):
        return loader.batch_sampler.batch_size if isinstance(loader.batch_sampler, BatchSampler) else loader.batch_size
    return None


def training_loaders(loader: Any) -> dict[str, Any]:
    if isinstance(loader, LoaderGroup):
        return loader.loaders
    return dict(loader) if isinstance(loader, Mapping) else {"": loader}


def foreign_iterable(loader: object, dp_size: int) -> Iterable[Any]:
    is_per_rank = isinstance(loader, PerRankLoader)
    if isinstance(loader, PerRankLoader):
        loader = loader.loader
    if isinstance(loader, StreamLoader):
        raise DataError(
            "A StreamLoader is for training, and validation reads its data whole. Validate on a dataset with `__len__` "
            "and `__getitem__`, or wrap an iterable over each rank's part in PerRankLoader."
        )
    holds_loaders = isinstance(loader, list | tuple) and any(isinstance(part, DataLoader) for part in loader)
    if holds_loaders or not isinstance(loader, Iterable):
        raise DataError(
            f"{type(loader).__name__} is no iterable of batches. Wrap a dataset in a DistributedDataLoader, and give "
            "several loaders as a dict by name."
        )
    if dp_size > 1 and not is_per_rank:
        raise DataError(
            f"A {type(loader).__name__} cannot be dealt to dp_size={dp_size} data-parallel ranks: its sampler, "
            "iterable dataset or own methods decide its samples. Use DistributedDataLoader over a map-style dataset; "
            "or, if it yields each rank's own batches already, wrap it in PerRankLoader(loader)."
        )
    return loader


def _has_own_methods(loader: DataLoader[Any]) -> bool:
    """Whether a subclass defines more than its constructor, which only sets options: that may decide the batches."""
    kinds = (FunctionType, classmethod, staticmethod, property)
    own = takewhile(_is_own, type(loader).__mro__)
    return any(name != "__init__" and isinstance(value, kinds) for cls in own for name, value in vars(cls).items())


def _is_own(cls: type) -> bool:
    """Whether a class is neither torch's nor torchdata's twin of it."""
    return cls.__module__.partition(".")[0] not in ("torch", "torchdata")


def _shuffles(sampler: Any, length: int) -> bool | None:
    """Whether a sampler's order is random; None if it is neither that nor sequential, or not over the whole dataset."""
    if _is_own(type(sampler)):
        return None
    if isinstance(sampler, SequentialSampler):
        return False if len(sampler.data_source) == length else None
    # Only a process that imported torchdata can hold one of its objects.
    torchdata = sys.modules.get("torchdata.stateful_dataloader.sampler")
    if isinstance(sampler, RandomSampler) or (torchdata is not None and isinstance(sampler, torchdata.RandomSampler)):
        covers_all = not sampler.replacement and sampler.num_samples == len(sampler.data_source) == length
        return True if covers_all else None
    if isinstance(sampler, DistributedSampler):
        dataset: Any = sampler.dataset
        return bool(sampler.shuffle) if len(dataset) == length else None
    return None
