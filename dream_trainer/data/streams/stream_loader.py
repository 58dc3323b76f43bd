"""The loader over sequential sources that a user hands to the trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import default_collate

from dream_trainer.checks import check_count
from dream_trainer.data.sources.stream_sources import HuggingFaceShards, ShardedSource
from dream_trainer.data.streams.lane_reader import LaneOptions
from dream_trainer.data.transforms import OnError, Transform, refuse_unclear_policy
from dream_trainer.errors import DataError


class StreamLoader:
    """Batches from a sequential source in shards, dealt to ranks and workers, that resumes at any step.

    Which samples make up an optimizer step depends on the seed and the source alone, not on ranks, workers or
    accumulation: shards are dealt to lanes, and a step takes equally many samples from each of its lanes
    (docs/data.md). The trainer tells it rank and seed; iterated by itself it yields what a single process sees
    with seed 0.

    Args:
        source: A ShardedSource (`WebDatasetShards`, `IterableShards`, `HuggingFaceShards` or your own), or a streaming
            dataset of Hugging Face's `datasets`.
        batch_size: Samples in one micro-batch of one rank.
        transforms: What is done to samples, in this order: `Map`, `Filter`, `Batch`, `Unbatch`, `Shuffle`. In workers.
        lanes: Lanes that each step reads; it divides the global batch, and the data-parallel ranks divide it. None for
            the largest divisor of the global batch that there are shards for, up to 64.
        turns: Sets of lanes, read by consecutive steps in turn, so that several workers find work where a step has one
            micro-batch; `lanes * turns` shards are read at a time. None for as many as there are shards for, up to
            4, or as deal the shards evenly.
        shuffle_shards: Whether each lane reads its shards in a random order of their own in each epoch. Samples are
            shuffled by `Shuffle(window)` among the transforms.
        repeat: Whether each lane begins its shards again when it has read them. With False a pass ends for all with the
            last step that each lane can fill, and the next epoch begins with all shards.
        num_workers: Processes that load ahead; 0 loads in the training process.
        collate_fn: Turns a list of samples into a batch.
        on_error: What to do with a sample for which a transform raises: "raise", or "skip", which is counted and
            logged. What the source itself raises ends the run.
        max_skipped: With "skip", how many samples each lane may skip in the whole run; with `repeat=False`, in each
            pass.
        pin_memory: Whether batches are copied to page-locked memory.
        prefetch_factor: Batches that each worker loads ahead; torch's default is 2.
        multiprocessing_context: "fork", "spawn", "forkserver" or a context object.
        timeout: Seconds to wait for a batch from a worker; 0 is for ever.
        worker_init_fn: Called with 0 in each worker when it starts.

    Raises:
        DataError: The source is none, has no shards, or an option has no meaning.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        transforms: Sequence[Transform] = (),
        lanes: int | None = None,
        turns: int | None = None,
        shuffle_shards: bool = False,
        repeat: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        on_error: OnError = "raise",
        max_skipped: int | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        check_count("batch_size", batch_size, hint="Give the samples of one rank's micro-batch.")
        source = sharded_source(source)
        if source.num_shards < 1:
            raise DataError(f"the source ({type(source).__name__}) has 0 shards. Check its path and split.")
        limit = refuse_unclear_policy(on_error, max_skipped)
        self.options = LaneOptions(source, tuple(transforms), shuffle_shards, repeat, on_error, limit)
        self.batch_size = batch_size
        self.lanes = lanes
        self.turns = turns
        self.num_workers = num_workers
        self.collate_fn = default_collate if collate_fn is None else collate_fn
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.multiprocessing_context = multiprocessing_context
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn

    def __iter__(self) -> Iterator[Any]:
        from dream_trainer.data.streams.lane_stream import LaneStream

        stream = LaneStream(self, accumulation=1, dp_rank=0, dp_size=1, seed=0)
        try:
            while (window := stream.next_window()) is not None:
                yield from window.batches
        finally:
            stream.close()


def sharded_source(source: object) -> ShardedSource:
    if isinstance(source, ShardedSource):
        return source
    datasets = sys.modules.get("datasets")  # only a process that imported it can hold one of its objects
    if datasets is not None and isinstance(source, datasets.IterableDataset):
        return HuggingFaceShards(source)
    raise DataError(
        f"{type(source).__name__} is not a source in shards. Give a streaming dataset of Hugging Face, "
        "WebDatasetShards(directory), or IterableShards(reader, items) for readers of your own; a dataset with "
        "`__len__` and `__getitem__` belongs in a DistributedDataLoader."
    )
