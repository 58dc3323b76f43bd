"""The training streams of one rank or of all ranks of a job, and what they read."""

from collections.abc import Callable, Sequence
from typing import Any

from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.data.stream import TrainStream, train_stream
from dream_trainer.data.window import DataPosition, Window

Layout = tuple[int, int, int]
"""(ranks, accumulation, workers)"""


def open_stream(loader: Any, accumulation: int = 1, *, rank: int = 0, size: int = 1, seed: int = 3, **more: Any) -> Any:
    return train_stream(loader, accumulation=accumulation, dp_rank=rank, dp_size=size, seed=seed, **more)


def open_ranks(
    make: Callable[[], Any], layout: Layout, global_batch: int, *, seed: int = 3, **options: Any
) -> list[TrainStream]:
    """A stream for each rank, over a dataset that `make` gives it."""
    ranks, accumulation, workers = layout
    if workers:
        options = {"num_workers": workers, "multiprocessing_context": "fork"} | options
    loaders = [DistributedDataLoader(make(), global_batch // (ranks * accumulation), **options) for _ in range(ranks)]
    return [open_stream(loader, accumulation, rank=rank, size=ranks, seed=seed) for rank, loader in enumerate(loaders)]


def next_step(streams: Sequence[TrainStream]) -> tuple[list[Any], Window] | None:
    """The micro-batches of one step in global order and rank 0's window, or None where the pass of all has ended."""
    windows = [stream.next_window() for stream in streams]
    if windows[0] is None:
        assert windows == [None] * len(windows)
        return None
    per_rank = [list(window.batches) for window in windows]
    assert [window.size for window in windows] == [len(batches) for batches in per_rank]
    return [batch for chunk in zip(*per_rank, strict=True) for batch in chunk], windows[0]


def seek(streams: Sequence[TrainStream], position: DataPosition, state: Any = None, **more: Any) -> None:
    for stream in streams:
        stream.seek(position, None, state=state, **more)


def close(streams: Sequence[TrainStream]) -> None:
    for stream in streams:
        stream.close()


def read(stream: TrainStream, passes: int) -> list[list[Any]]:
    """Each window's batches, as lists of numbers."""
    windows = []
    while passes:
        window = stream.next_window()
        if window is None:
            passes -= 1
        else:
            windows.append([batch.tolist() if hasattr(batch, "tolist") else batch for batch in window.batches])
    return windows


def windows_until(stream: TrainStream, count: int) -> list[Window]:
    """The first `count` windows of all passes, of a stream that has read one ahead, as the loop does."""
    windows = []
    while len(windows) < count:
        if (window := stream.next_window()) is not None:
            windows.append(window)
    stream.next_window()
    return windows
