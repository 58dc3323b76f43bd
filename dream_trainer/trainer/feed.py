"""The windows a rank trains, in step with the other ranks.

Our own loaders give every rank the same number of windows by construction. Any other loader may end on one rank first,
so the feed keeps one window ahead: the pulse of a window already says whether some rank cannot fill the next, and only
then do the ranks agree, all at the same step, on how much of it everybody can train. Protocol: PROVEN.md section C.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from dream_trainer.data.stream import DataPosition, TrainStream, Window
from dream_trainer.distributed.world import World
from dream_trainer.errors import DataError

logger = logging.getLogger("dream_trainer")


class WindowFeed:
    """Windows of one rank, cut to what all ranks have.

    Args:
        stream: This rank's data.
        world: The ranks.
        accumulation: Micro-batches in a whole window.

    Attributes:
        is_short: Whether this rank cannot fill the window after the one taken last.
        is_pass_over: Whether the window taken last was the last of its pass over the data, on all ranks.
        rank_state: What the stream needs, beside the position, to go on after the window taken last.
    """

    def __init__(self, stream: TrainStream, world: World, accumulation: int) -> None:
        self._stream = stream
        self._world = world
        self._accumulation = accumulation
        self._ahead: Window | None = None
        self._is_fetched = False
        self._empty_passes = 0
        self.is_short = False
        self.is_pass_over = False
        self.rank_state: dict[str, Any] | None = None

    def seek(self, position: DataPosition, rank_state: dict[str, Any] | None, *, is_pass_over: bool) -> None:
        """Goes on after `position`; with `is_pass_over`, with the next pass."""
        self._ahead, self._is_fetched = None, False
        self.rank_state = rank_state
        if position != DataPosition(0, 0, 0) or rank_state is not None:
            self._stream.seek(position, rank_state)
        if is_pass_over:
            self._stream.end_pass()

    def take(self) -> Window | None:
        """The next window to train.

        Returns:
            The window, or None where a pass had none for all ranks; the next call begins the next pass.

        Raises:
            DataError: Two passes in a row had no window.
        """
        if not self._is_fetched:
            self._fetch()
            if not self._stream.is_even:
                self._agree()
        window, self._ahead, self._is_fetched = self._ahead, None, False
        self.is_short = self.is_pass_over = False
        if window is None:
            self._count_empty_pass()
            return None
        self._empty_passes = 0
        self.rank_state = window.rank_state
        if window.is_last:
            self._end_pass()
        elif window.is_last is None:
            self._fetch()
            self.is_short = not self._stream.is_even and (self._ahead is None or self._ahead.size < self._accumulation)
            if self._ahead is None and self._stream.is_even:
                self._end_pass()
        return window

    def agree_on_next(self) -> None:
        """After a pulse that says some rank cannot fill the next window: all agree how much of it to train."""
        self._agree()
        if self._ahead is None:
            self._end_pass()

    def _fetch(self) -> None:
        self._ahead, self._is_fetched = self._stream.next_window(), True

    def _end_pass(self) -> None:
        self._stream.end_pass()
        self._ahead, self._is_fetched, self.is_pass_over = None, False, True

    def _agree(self) -> None:
        """Cuts the window ahead to the shortest rank's; a collective."""
        mine = 0 if self._ahead is None else self._ahead.size
        sizes = self._world.all_gather(torch.tensor([mine])).flatten().tolist()
        shortest = min(sizes)
        if shortest == self._accumulation:
            return
        left_over = sum(sizes) - shortest * len(sizes)
        if left_over and self._world.is_main:
            logger.warning(
                "The data of some ranks ended first: %d batches that the others held ready are not trained "
                "in this pass.",
                left_over,
            )
        # Whatever is left is the last window of the pass on every rank.
        self._ahead = None if self._ahead is None else _cut(self._ahead, shortest)

    def _count_empty_pass(self) -> None:
        self._empty_passes += 1
        if self._empty_passes == 2:
            raise DataError(
                "two passes over the training data had no batch that every rank could train. "
                "Give every rank at least one batch, or use a DistributedDataLoader."
            )


def _cut(window: Window, size: int) -> Window | None:
    if size == 0:
        return None
    if size == window.size:
        return replace(window, is_last=True)
    end = DataPosition(window.end.epoch, window.end.samples, window.end.batches - (window.size - size))
    return replace(window, size=size, batches=list(window.batches)[:size], end=end, is_last=True)
