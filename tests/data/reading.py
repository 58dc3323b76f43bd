"""The training streams of one rank or of all ranks of a job, and what they read."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.data.stream import TrainStream, train_stream, validation_batches
from dream_trainer.data.window import DataPosition, Window

Layout = tuple[int, int, int]
"""(ranks, accumulation, workers)"""


def open_stream(loader: Any, accumulation: int = 1, *, rank: int = 0, size: int = 1, seed: int = 3, **more: Any) -> Any:
    return train_stream(loader, accumulation=accumulation, dp_rank=rank, dp_size=size, seed=seed, **more)


def open_validation(loader: Any, rank: int = 0, size: int = 1, seed: int = 0) -> Any:
    return validation_batches(loader, dp_rank=rank, dp_size=size, seed=seed)


def open_ranks(
    make: Callable[[], Any], layout: Layout, global_batch: int, *, seed: int = 3, **options: Any
) -> list[TrainStream]:
    """A stream for each rank, over a dataset that `make` gives it."""
    ranks, accumulation, workers = layout
    if workers:
        options = {"num_workers": workers, "multiprocessing_context": "fork"} | options
    loaders = [DistributedDataLoader(make(), global_batch // (ranks * accumulation), **options) for _ in range(ranks)]
    return [open_stream(loader, accumulation, rank=rank, size=ranks, seed=seed) for rank, loader in enumerate(loaders)]


class Job:
    """All ranks of a run, in one process, which read and are resumed as a trainer does it."""

    def __init__(self, streams: Sequence[TrainStream]) -> None:
        self.streams = streams
        self.windows: list[Any] = []  # of each rank in the last step

    @property
    def datasets(self) -> list[Any]:
        return [stream.reader.loader.dataset for stream in self.streams]

    @property
    def end(self) -> DataPosition:
        return self.windows[0].end

    def read(self, count: int) -> Iterator[list[Any]]:
        """The micro-batches of each of the next steps, in global order."""
        for _ in range(count):
            windows: list[Any] = [stream.next_window() for stream in self.streams]
            if windows[0] is None:  # the end of a pass, which the last window did not know
                assert windows == [None] * len(windows)
                windows = [stream.next_window() for stream in self.streams]
            per_rank = [list(window.batches) for window in windows]
            assert [window.size for window in windows] == [len(batches) for batches in per_rank]
            if windows[0].is_last:
                for stream in self.streams:
                    stream.end_pass()
            self.windows = windows
            yield [batch for chunk in zip(*per_rank, strict=True) for batch in chunk]

    def steps(self, count: int) -> list[Any]:
        """The next steps in the form in which they are compared."""
        return list(self.read(count))

    def saved(self) -> list[str]:
        """What each rank would save now, in a file."""
        ends = [
            (asdict(window.end), window.rank_state, bool(window.is_last), stream.state_at(window.end))
            for stream, window in zip(self.streams, self.windows, strict=False)
        ]
        return [json.dumps(end) for end in ends]

    def go_on(self, saved: Sequence[str]) -> None:
        """From what all ranks of a job saved, which may have had others."""
        ends = [json.loads(end) for end in saved]
        for number, stream in enumerate(self.streams):
            position, _, is_pass_over, state = ends[number % len(ends)]
            rank_state = stream.united([end[1] for end in ends])
            stream.seek(DataPosition(**position), rank_state, is_pass_over=is_pass_over, state=state)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


def read_in_parts(
    open_job: Callable[[Layout], Job],
    parts: Sequence[tuple[Layout, int]],
    between: Callable[[Any], None] = lambda job: None,
) -> list[Any]:
    """Steps in several layouts, each by a new job from what the one before saved; `between` is for the second one."""
    found: list[Any] = []
    saved: list[str] = []
    for number, (layout, count) in enumerate(parts):
        job = open_job(layout)
        if saved:
            job.go_on(saved)
        if number == 1:
            between(job)
        found += job.steps(count)
        saved = job.saved()
        job.close()
    return found


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
