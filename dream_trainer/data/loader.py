"""The loaders that users hand to the trainer: ours, plain ones rebuilt as ours, and per-rank ones. A plain `DataLoader`
cannot resume, so one in sequential or random order becomes a `DistributedDataLoader`; any other serves one data-
parallel rank as it is."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import takewhile
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

from dream_trainer.checks import check_count
from dream_trainer.compat.pytorch import shutdown_workers
from dream_trainer.data.lane_stream import StreamLoader
from dream_trainer.data.loader_groups import AlternatingLoaders, LoaderGroup
from dream_trainer.data.ordered import MarkedBatches, OrderedDataset
from dream_trainer.data.sampler import KeyedDataset, RankBatchSampler, Sharding
from dream_trainer.data.worker_start import WorkerInit, as_it_is, started, worker_options
from dream_trainer.distributed.ranks import plain_facts
from dream_trainer.distributed.seeds import hash_seed
from dream_trainer.errors import DataError


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

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        drop_last: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise DataError(
                f"{type(dataset).__name__} has no length and no samples by number, so it cannot be dealt to ranks. "
                "Give a dataset with `__len__` and `__getitem__`, or let it yield each rank's own part and wrap its "
                "loader in PerRankLoader."
            )
        check_count("batch_size", batch_size, hint="Give the samples of one rank's micro-batch.")
        if len(dataset) == 0:
            raise _no_samples("dataset", dataset)
        if shuffle and isinstance(dataset, OrderedDataset):
            raise DataError(
                f"shuffle=True, and the dataset ({type(dataset).__name__}) decides its order itself. Use shuffle=False."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.collate_fn = default_collate if collate_fn is None else collate_fn
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.prefetch_factor = prefetch_factor
        self.multiprocessing_context = multiprocessing_context
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn

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
            raise DataError(
                f"A {type(loader).__name__} is made for several ranks already. Use it without PerRankLoader."
            )
        self.loader = loader


class ShardReader:
    """Reads one rank's part of a DistributedDataLoader's passes through torch's `DataLoader`, from any sample on."""

    def __init__(self, loader: DistributedDataLoader, sharding: Sharding, *, seed: int, shuffle: bool) -> None:
        self.seed = seed
        self.loader = loader
        self.sampler = RankBatchSampler(len(loader.dataset), sharding, seed=seed, shuffle=shuffle)
        # Without its own generator, DataLoader draws its workers' base seed from the global one, and so would move the
        # training process's random stream at each epoch (and at each resume).
        self.generator = torch.Generator(device="cpu")
        self._torch_loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self.ordered = loader.dataset if isinstance(loader.dataset, OrderedDataset) else None
        self.marked = MarkedBatches()
        self.begin(0, None)

    def begin(self, epoch: int, state: dict[str, Any] | None) -> None:
        """Makes an OrderedDataset begin pass `epoch`, or resume in it from `state`. Prefetched samples are dropped."""
        if self.ordered is not None:
            self.ordered.begin(self.seed, state)
            self.ordered.set_epoch(epoch)
            self.dataset_changed()

    def batches(self, epoch: int, first: int, end: int) -> Iterator[Any]:
        """This rank's batches of the positions from `first` up to `end` in `epoch`'s order; ends those before."""
        if self._torch_loader is None:
            self._torch_loader = self._build()
        self.release()
        self.sampler.start(epoch, first, end)
        self.generator.manual_seed(hash_seed(b"workers", self.seed, epoch, first, self.sampler.sharding.dp_rank))
        self._iterator = started(self._torch_loader)
        if self.ordered is None:
            return self._iterator
        return self.marked.follow(self._iterator, first, self.sampler.sharding.chunk_size)

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

    @property
    def keyed_dataset(self) -> KeyedDataset:
        """The dataset as the run reads it: seeded by sample, and collated."""
        loader = self.loader
        return KeyedDataset(loader.dataset, loader.collate_fn, self.seed)

    def dataset_changed(self) -> None:
        """Makes the next pass read the dataset as it is now: persistent workers hold an earlier copy."""
        self.sampler.length = len(self.loader.dataset)
        if self.loader.persistent_workers:
            self.close()

    def release(self) -> None:
        self._iterator = None
        self.marked.release()

    def close(self) -> None:
        shutdown_workers(self._iterator)
        self.release()
        self._torch_loader = None

    def _build(self) -> DataLoader[Any]:
        loader = self.loader
        options: dict[str, Any] = worker_options(loader) | {"worker_init_fn": WorkerInit(loader.worker_init_fn)}
        return DataLoader(
            self.keyed_dataset,
            batch_sampler=self.sampler,  # type: ignore[arg-type]  # what it yields goes to KeyedDataset as it is
            collate_fn=as_it_is,
            generator=self.generator,
            persistent_workers=loader.persistent_workers,
            **options,
        )


def rebuild(loader: object, purpose: str = "training") -> DistributedDataLoader | None:
    """A plain `DataLoader` as ours, with all its options; None if its order or its code is the user's."""
    if not isinstance(loader, DataLoader) or _has_own_methods(loader):
        return None
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        return None
    if not isinstance(batches, BatchSampler) or not _is_class(type(batches), BatchSampler, "BatchSampler"):
        return None
    if (shuffle := _shuffles(batches.sampler, len(loader.dataset))) is None:
        return None
    if len(loader.dataset) == 0:
        raise _no_samples(f"{purpose} dataset", loader.dataset)
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
    if isinstance(loader, Mapping) and loader:
        loader = LoaderGroup(loader)
    if isinstance(loader, LoaderGroup | AlternatingLoaders):
        sizes = [loader_batch_size(one) for one in loader.loaders.values()]
        if isinstance(loader, LoaderGroup):
            return None if None in sizes else sum(size or 0 for size in sizes)
        return sizes[0] if len(set(sizes)) == 1 else None
    if isinstance(loader, DistributedDataLoader | StreamLoader):
        return loader.batch_size
    if isinstance(loader, DataLoader):
        return loader.batch_sampler.batch_size if isinstance(loader.batch_sampler, BatchSampler) else loader.batch_size
    return None


def training_loaders(loader: Any) -> dict[str, Any]:
    if isinstance(loader, LoaderGroup | AlternatingLoaders):
        return loader.loaders
    return dict(loader) if isinstance(loader, Mapping) else {"": loader}


def foreign_iterable(loader: object, dp_size: int) -> Iterable[Any]:
    is_per_rank = isinstance(loader, PerRankLoader)
    if isinstance(loader, PerRankLoader):
        loader = loader.loader
    # of a list of batches any element may be a list or a dict, but none a loader
    parts = list(loader.values()) if isinstance(loader, Mapping) else loader
    if isinstance(parts, list | tuple) and any(
        isinstance(part, DataLoader | DistributedDataLoader | PerRankLoader) for part in parts
    ):
        raise DataError(
            f"A {type(loader).__name__} of {len(parts)} data loaders is not a data loader: it yields loaders, not "
            'batches. Give a dict of named loaders, such as {"easy": ..., "hard": ...}: for training a batch of each, '
            "for validation one after the other. Or give one loader."
        )
    if isinstance(loader, StreamLoader):
        raise DataError(
            "A StreamLoader is for training: it ends with a step that all lanes can fill, or never, and validation "
            "reads its data whole. Validate on a dataset with `__len__` and `__getitem__`, or wrap an iterable over "
            "each rank's part in PerRankLoader."
        )
    if not isinstance(loader, Iterable):
        raise DataError(
            f"A data loader must be an iterable of batches, and {type(loader).__name__} is none. Wrap a dataset in "
            "DistributedDataLoader(dataset, batch_size=...)."
        )
    if dp_size > 1 and not is_per_rank:
        raise DataError(
            f"A {type(loader).__name__} cannot be dealt to dp_size={dp_size} data-parallel ranks: its sampler, "
            "iterable dataset or own methods decide its samples, so each would train on all of it. Use "
            "DistributedDataLoader(dataset, batch_size=..., collate_fn=...) over a map-style dataset; or, if it yields "
            "each rank's own batches already, wrap it in PerRankLoader(loader)."
        )
    return loader


def _no_samples(name: str, dataset: Any) -> DataError:
    return DataError(f"The {name} ({type(dataset).__name__}) has 0 samples. Check its path, split and filters.")


def _has_own_methods(loader: DataLoader[Any]) -> bool:
    """Whether a subclass defines more than its constructor, which only sets options: that may decide the batches."""
    own = takewhile(lambda cls: not _is_class(cls, DataLoader, "StatefulDataLoader"), type(loader).__mro__)
    kinds = (FunctionType, classmethod, staticmethod, property)
    return any(name != "__init__" and isinstance(value, kinds) for cls in own for name, value in vars(cls).items())


def _is_class(cls: type, torch_class: type, torchdata_name: str) -> bool:
    """Whether `cls` is torch's class or torchdata's twin of it, and no subclass."""
    # Only a process that imported torchdata can hold one of its objects.
    torchdata = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    samplers = sys.modules.get("torchdata.stateful_dataloader.sampler")
    twins = {**(vars(samplers) if samplers else {}), **(vars(torchdata) if torchdata else {})}
    return cls is torch_class or cls is twins.get(torchdata_name)


def _shuffles(sampler: Any, length: int) -> bool | None:
    """Whether a sampler's order is random; None if it is neither that nor sequential, or not over the whole dataset."""
    if type(sampler) is SequentialSampler:
        return False if len(sampler.data_source) == length else None
    if _is_class(type(sampler), RandomSampler, "RandomSampler"):
        covers_all = not sampler.replacement and sampler.num_samples == len(sampler.data_source) == length
        return True if covers_all else None
    if _is_class(type(sampler), DistributedSampler, "StatefulDistributedSampler"):
        return bool(sampler.shuffle) if len(sampler.dataset) == length else None
    return None
