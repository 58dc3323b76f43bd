"""The training streams of one rank or of all ranks of a job, and what they read."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tests.api import DataPosition, DistributedDataLoader, TrainStream, train_stream, validation_batches

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


End = tuple[DataPosition, dict[str, Any] | None, bool]
"""Where a rank is after a step, its own state there, and whether the pass is over."""


class Job:
    """All ranks of a run, in one process, which read, save and resume as a trainer does it."""

    def __init__(self, streams: Sequence[TrainStream], form: Callable[[list[Any]], Any] = list) -> None:
        self.streams, self.form = streams, form
        self.ends: list[End] = [(DataPosition(0, 0, 0), None, False) for _ in streams]
        self._ahead: list[Any] | None = None

    @property
    def datasets(self) -> list[Any]:
        return [stream.reader.loader.dataset for stream in self.streams]

    @property
    def position(self) -> DataPosition:
        return self.ends[0][0]

    @property
    def is_pass_over(self) -> bool:
        return self.ends[0][2]

    def read(self, count: int) -> Iterator[list[Any]]:
        """The micro-batches of each of the next steps, in global order."""
        for _ in range(count):
            windows = self._ahead or self._load() or self._load()
            assert windows is not None
            is_over, self._ahead = windows[0].is_last, None
            if is_over is None:  # which only the next window tells
                self._ahead = self._load()
                is_over = self._ahead is None
            positions = [self._after(*each) for each in zip(self.ends, windows, strict=True)]
            self.ends = [(at, window.rank_state, is_over) for at, window in zip(positions, windows, strict=True)]
            if is_over:
                for stream in self.streams:
                    stream.end_pass()
            yield [batch for chunk in zip(*(window.batches for window in windows), strict=True) for batch in chunk]

    def _load(self) -> list[Any] | None:
        windows: list[Any] = [stream.next_window() for stream in self.streams]
        if windows[0] is None:
            assert windows == [None] * len(windows)
            return None
        for window in windows:
            window.batches = list(window.batches)
            assert len(window.batches) == window.size
        return windows

    @staticmethod
    def _after(before: End, window: Any) -> DataPosition:
        """Where a window ends; samples that its loader does not count are counted."""
        end, former = window.end, before[0]
        if end.samples or window.sizes is None:
            return end
        samples = former.samples if former.epoch == end.epoch else 0
        return DataPosition(end.epoch, samples + sum(window.sizes), end.batches)

    def steps(self, count: int) -> list[Any]:
        """The next steps in the form in which they are compared."""
        return [self.form(batches) for batches in self.read(count)]

    def saved(self) -> list[str]:
        """What each rank would save now, in a file."""
        return [
            json.dumps([asdict(position), rank_state, is_over, stream.state_at(position)])
            for stream, (position, rank_state, is_over) in zip(self.streams, self.ends, strict=True)
        ]

    def go_on(self, saved: Sequence[str]) -> None:
        """From what all ranks of a job saved, which may have had others."""
        files = [json.loads(text) for text in saved]
        for number, stream in enumerate(self.streams):
            position, own, is_over, state = files[number % len(files)]
            rank_state = own if len(files) == len(self.streams) else None
            if stream.resumes_from_all_ranks:
                rank_state = stream.united([of_rank for _, of_rank, _, _ in files])
            self.ends[number] = (DataPosition(**position), rank_state, is_over)
            stream.seek(self.ends[number][0], rank_state, is_pass_over=is_over, state=state)

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
        if number > 0:
            job.go_on(saved)
        if number == 1:
            between(job)
        found += job.steps(count)
        if number + 1 < len(parts):
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


def windows_until(stream: TrainStream, count: int) -> list[Any]:
    """The first `count` windows of all passes, of a stream that has read one ahead, as the loop does."""
    windows = []
    while len(windows) < count:
        if (window := stream.next_window()) is not None:
            windows.append(window)
    stream.next_window()
    return windows
