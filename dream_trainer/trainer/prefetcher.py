"""Loads the next accumulation step while the ranks decide whether to train it, and counts its samples and tokens."""

from __future__ import annotations

import math
from functools import partial

import torch

from dream_trainer.data.sample_count import whole_number
from dream_trainer.data.stream import Window
from dream_trainer.errors import DataError
from dream_trainer.trainer.runtime import Runtime


def next_window(runtime: Runtime) -> Window | None:
    """The next window, once every rank has its part of it and knows whether to continue."""
    state, coordinator, feed = runtime.window, runtime.coordinator, runtime.data.feed
    coordinator.signals.wait_for_data(feed.fetch, partial(_save_while_waiting, runtime))
    if coordinator.stopped:
        return None
    samples, tokens = _count(runtime, feed.window)
    while True:
        flags = state.flags = coordinator.exchange(samples=samples, tokens=tokens, short=feed.is_short)
        if coordinator.stopped:
            return None
        if flags.save:
            _save(runtime)
        if not flags.waiting:
            break
    state.samples, state.tokens = flags.samples, flags.tokens
    if flags.short:
        feed.agree()
        counts = torch.tensor(_count(runtime, feed.window))
        state.samples, state.tokens = runtime.world.all_reduce(counts).tolist()
    window = feed.take()
    if window is not None and window.samples is not None:
        state.samples = window.samples
    return window


def _save_while_waiting(runtime: Runtime) -> bool:
    """Answers a signal that asks for a save during the wait for data; returns whether to keep waiting."""
    flags = runtime.coordinator.exchange(waiting=True)
    if flags.save and not runtime.coordinator.stopped:
        _save(runtime)
    return not runtime.coordinator.stopped


def _save(runtime: Runtime) -> None:
    runtime.coordinator.requests.take_save()
    runtime.saver.save_if_due(step=None, epoch=None, is_last=False, requested=True)


def _count(runtime: Runtime, window: Window | None) -> tuple[int, int]:
    count = runtime.data.count
    if window is None:
        sizes: list[int] = []
    elif count.own is not None:  # as the user counts them
        sizes = [count(batch) for batch in window.batches]
    else:
        assert window.sizes is not None  # a trainer's stream counts
        sizes = window.sizes
    runtime.window.sizes = sizes
    if not runtime.world.counts_samples:
        return 0, 0
    is_known = window is not None and window.samples is not None  # of all ranks
    return 0 if is_known else sum(sizes), _tokens(runtime, window)


def _tokens(runtime: Runtime, window: Window | None) -> int:
    """Tokens of a window on this rank; 0 where its batches do not tell."""
    total, hooks = 0, runtime.hooks
    for batch in () if window is None else window.batches:
        tokens = hooks.batch_tokens(batch)
        if tokens is not None:
            total += whole_number(tokens, f"{type(hooks).__name__}.batch_tokens", batch)
        elif runtime.schedule.max_tokens < math.inf:
            raise DataError(
                f"max_tokens={runtime.schedule.max_tokens}, and batch_tokens gives None for a batch of type "
                f"{type(batch).__name__}: it has no documents, attention_mask or labels on the host. Override "
                "batch_tokens(batch) in your trainer."
            )
    return total
