"""Prefetcher: loads the next accumulation step while the ranks decide whether to train it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dream_trainer.checkpoint.saving import Saving
from dream_trainer.data.feed import WindowFeed
from dream_trainer.data.sample_count import SampleCount, whole_number
from dream_trainer.data.stream import Window
from dream_trainer.distributed.world import World
from dream_trainer.errors import DataError
from dream_trainer.trainer.coordinator import Coordinator
from dream_trainer.trainer.counters import WindowState
from dream_trainer.trainer.schedule import Schedule


class Prefetcher:
    """Loads accumulation steps, and counts their samples and tokens over all ranks."""

    def __init__(
        self,
        coordinator: Coordinator,
        world: World,
        saver: Saving,
        state: WindowState,
        count: SampleCount,
        tokens_of: tuple[Callable[[Any], int | None], str],
        schedule: Schedule,
    ) -> None:
        self._coordinator, self._world, self._saver = coordinator, world, saver
        self._state, self._count_of_batch = state, count
        self._tokens_of, self._schedule = tokens_of, schedule

    def next_window(self, feed: WindowFeed) -> Window | None:
        """The next window, once every rank has its part of it and knows whether to continue."""
        state, coordinator = self._state, self._coordinator
        coordinator.signals.wait_for_data(feed.fetch, self._save_while_waiting)
        if coordinator.stopped:
            return None
        samples, tokens = self._count(feed.window)
        while True:
            flags = state.flags = coordinator.exchange(samples=samples, tokens=tokens, short=feed.is_short)
            if coordinator.stopped:
                return None
            if flags.save:
                self._save()
            if not flags.waiting:
                break
        state.samples, state.tokens = flags.samples, flags.tokens
        if flags.short:
            feed.agree()
            counts = torch.tensor(self._count(feed.window))
            state.samples, state.tokens = self._world.all_reduce(counts).tolist()
        window = feed.take()
        if window is not None and window.samples is not None:
            state.samples = window.samples
        return window

    def _save_while_waiting(self) -> bool:
        """Answers a signal that asks for a save during the wait for data; returns whether to keep waiting."""
        flags = self._coordinator.exchange(waiting=True)
        if flags.save and not self._coordinator.stopped:
            self._save()
        return not self._coordinator.stopped

    def _save(self) -> None:
        self._coordinator.requests.take_save()
        self._saver.save_if_due(step=None, epoch=None, is_last=False, requested=True)

    def _count(self, window: Window | None) -> tuple[int, int]:
        sizes = self._state.sizes = sizes_of(window, self._count_of_batch)
        if not self._world.counts_samples:
            return 0, 0
        is_known = window is not None and window.samples is not None  # of all ranks
        return 0 if is_known else sum(sizes), self._tokens(window)

    def _tokens(self, window: Window | None) -> int:
        """Tokens of a window on this rank; 0 where its batches do not tell."""
        total, (tokens_of, name) = 0, self._tokens_of
        for batch in () if window is None else window.batches:
            tokens = tokens_of(batch)
            if tokens is not None:
                total += whole_number(tokens, name, batch)
            elif self._schedule.max_tokens < math.inf:
                raise DataError(
                    f"max_tokens={self._schedule.max_tokens}, and batch_tokens gives None for a batch of type "
                    f"{type(batch).__name__}: it has no documents, attention_mask or labels on the host. Override "
                    "batch_tokens(batch) in your trainer."
                )
        return total


def sizes_of(window: Window | None, count: SampleCount) -> list[int]:
    """Samples of each of a window's batches on this rank: as the user counts them, otherwise as the stream knows."""
    if window is None:
        return []
    if count.own is not None:
        return [count(batch) for batch in window.batches]
    assert window.sizes is not None  # a trainer's stream counts
    return window.sizes
