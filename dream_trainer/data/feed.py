"""The windows a rank trains, in step with the other ranks. A window is loaded whole before it is trained. A loader that
may end on one rank first is read one window ahead, so no rank waits for data inside a collective of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from dream_trainer.data.sample_count import SampleCount
from dream_trainer.data.stream import ValidationBatches
from dream_trainer.data.window import DataPosition, SavedState, TrainStream, Window
from dream_trainer.distributed.ranks import Ranks, refuse_differences
from dream_trainer.errors import DataError, call_each
from dream_trainer.screen import logger


class WindowFeed:
    """One rank's windows, of all ranks' common length: `fetch`, `agree` if some rank `is_short`, `take`, `trained`."""

    def __init__(self, stream: TrainStream, world: Ranks, accumulation: int) -> None:
        self._stream = stream
        self._world = world
        self._accumulation = accumulation
        self._fetched: list[Window | None] = []  # the next window, and the one after it if it was looked for
        self._empty_passes = 0
        self._sought: tuple[DataPosition, SavedState, bool, SavedState] | None = None
        self._begins_pass = True
        self.is_pass_over = False
        self.rank_state: dict[str, Any] | None = None
        self.seconds_waiting = 0.0

    def seek(self, position: DataPosition, rank_state: SavedState, *, is_pass_over: bool, state: SavedState) -> None:
        """Continues after `position`, or with the next pass; the states are this rank's and the one of all ranks."""
        self._fetched = []
        self.rank_state = rank_state
        self._begins_pass = True
        if position != DataPosition(0, 0, 0) or rank_state is not None or state is not None:
            self._sought = position, rank_state, is_pass_over, state

    @property
    def window(self) -> Window | None:
        return self._fetched[0] if self._fetched else None

    def state_at(self, position: DataPosition) -> dict[str, Any] | None:
        return self._sought[-1] if self._sought is not None else self._stream.state_at(position)

    def numbers_at(self, position: DataPosition) -> Mapping[str, float]:
        return {} if self._sought is not None else self._stream.numbers_at(position)

    def follow(self, stream: TrainStream, position: DataPosition) -> None:
        """Continues with another stream: with the next pass, or where a `seek` said if nothing was fetched since."""
        self._stream.close()
        self._stream = stream
        if self._sought is None:
            self.seek(position, None, is_pass_over=True, state=None)

    def fetch(self) -> None:
        """Loads the next window, and the one after it if the end of the pass is unknown otherwise; no communication."""
        started = time.perf_counter()
        if self._sought is not None:
            position, rank_state, is_pass_over, state = self._sought
            self._stream.seek(position, rank_state, is_pass_over=is_pass_over, state=state)
            self._sought = None
        if not self._fetched:
            self._fetched.append(self._load())
        window = self._fetched[0]
        if window is not None and window.is_last is None and len(self._fetched) == 1:
            self._fetched.append(self._load())
        self.seconds_waiting += time.perf_counter() - started

    @property
    def is_short(self) -> bool:
        """Whether this rank cannot fill a window that it has looked for, so that all ranks must `agree`."""
        if self._stream.is_even:
            return False
        return min(self._sizes()) < self._accumulation

    def agree(self) -> None:
        """Cuts the fetched window to the shortest rank's; a collective."""
        now, ahead = self._world.all_gather(torch.tensor(self._sizes())).unbind(1)
        if now.min() < self._accumulation:
            self._fetched = [_cut(self.window, int(now.min())), None]
            self._report(int((now - now.min()).sum() + ahead.sum()))
        elif ahead.min() < self._accumulation:
            self._fetched[1:] = [_cut(window, int(ahead.min())) for window in self._fetched[1:]]
            self._report(int((ahead - ahead.min()).sum()))

    def _sizes(self) -> list[int]:
        """Micro-batches of the next window and of the one after it; 0 of one that there is not."""
        return [0 if window is None else window.size for window in (*self._fetched, None, None)[:2]]

    def take(self) -> Window | None:
        """The window to train now; None if a pass had none for all ranks."""
        window = self._fetched[0]
        if self._begins_pass:
            self._begins_pass = False
            # A dataset may change between two passes, but in the same way on all ranks; a collective
            if self._world.world_size > 1 and self._stream.length is not None:
                facts = {"samples of the training dataset in this pass": self._stream.length}
                refuse_differences(self._world, facts, "Change it in the same way on every rank.")
        self.is_pass_over = False
        if window is None:
            self._stream.end_pass()
            self._fetched = []
            self._begins_pass = True
            self._empty_passes += 1
            if self._empty_passes == 2:
                raise DataError("two passes over the training data had no batch for some rank. Give each rank one.")
        return window

    def trained(self, window: Window) -> None:
        """The window that was taken is trained, and counts."""
        self._empty_passes = 0
        self.rank_state = window.rank_state
        self.is_pass_over = window.is_last if window.is_last is not None else self._fetched[1] is None
        self._fetched = [] if self.is_pass_over else self._fetched[1:]
        if self.is_pass_over:
            self._stream.end_pass()
            self._begins_pass = True

    def _load(self) -> Window | None:
        window = self._stream.next_window()
        if window is None:
            return None
        window.batches = batches = list(window.batches)
        if len(batches) != window.size:
            raise DataError(
                f"the training loader ended in a window, with {len(batches)} of {window.size} batches: its dataset or "
                "sampler changed while it was read. Let it change between two passes."
            )
        return window

    def _report(self, left_over: int) -> None:
        if left_over and self._world.is_main:
            logger.warning(
                "The data of some ranks ended first: of the others', at least %s, is not trained in this pass.",
                "1 batch" if left_over == 1 else f"{left_over} batches",
            )


def _cut(window: Window | None, size: int) -> Window | None:
    if window is None or size == 0:
        return None
    if size == window.size:
        return replace(window, is_last=True)
    end = DataPosition(window.end.epoch, window.end.samples, window.end.batches - (window.size - size))
    sizes = None if window.sizes is None else window.sizes[:size]
    return replace(window, size=size, batches=list(window.batches)[:size], end=end, is_last=True, sizes=sizes)


class ConnectedData:
    feed: WindowFeed  # the windows to train, in step with the other ranks; set with the stream

    def __init__(self) -> None:
        self.stream: TrainStream | None = None  # windows of this rank's training data; None until setup has it
        self.loader: Any = None  # the training loader of that stream
        self.was_replaced = False  # whether `train_dataloader` was assigned again in this process
        self.validation: dict[str, ValidationBatches] = {}  # validation batches of this rank, by loader
        self.copy_stream: torch.Stream | None = None  # copies the next micro-batch to the device
        self.count = SampleCount()  # counts the samples of batches whose loader does not know

    def close(self) -> None:
        streams = [] if self.stream is None else [self.stream.close]
        call_each([*streams, *(batches.close for batches in self.validation.values())])


Move = Callable[[Any, torch.device], Any]


def on_device(batches: Iterable[Any], move: Move, device: torch.device, aside: torch.Stream | None) -> Iterator[Any]:
    """The micro-batches of one window, moved; with `aside` on that stream, one batch ahead of the trained one."""
    if aside is None:
        for batch in batches:
            yield move(batch, device)
        return
    waiting = iter(batches)
    # The window's first copy overlaps nothing: its memory may belong to a batch that is still in use.
    current = move(next(waiting), device)
    for batch in waiting:
        aside.wait_stream(torch.accelerator.current_stream(device))
        with aside:
            following = move(batch, device)
        yield current
        # Each stream waits for the other before it touches the same memory, which needs no `record_stream`.
        torch.accelerator.current_stream(device).wait_stream(aside)
        current = following
    yield current
