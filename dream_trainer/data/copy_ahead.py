"""How a window's micro-batches get to the device: on CUDA each while the one before it computes, on a stream aside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Move = Callable[[Any, torch.device], Any]


def on_device(batches: Iterable[Any], move: Move, device: torch.device, aside: torch.Stream | None) -> Iterator[Any]:
    """The micro-batches of one window, moved.

    Args:
        batches: Of one window, on the host.
        move: Called once for each, in order; with `aside` on that stream, for the next one just before this one is
            trained. One further batch is then on the device and no more, if the caller lets go of the one before.
        device: Where to.
        aside: A stream for copies (`copy_stream`); None moves each batch when it is asked for.
    """
    if aside is None:
        for batch in batches:
            yield move(batch, device)
        return
    waiting = iter(batches)
    # The window's first has nothing to go beside: its memory may be that of a batch that is still computed with.
    current = move(next(waiting), device)
    for batch in waiting:
        following = _move_aside(batch, move, device, aside)
        yield current
        # Each stream waits for the other before it touches the same memory, which needs no `record_stream`.
        torch.accelerator.current_stream(device).wait_stream(aside)
        current = following
    yield current


def copy_stream(device: torch.device) -> torch.Stream | None:
    """A stream for copies to `device`; None where copies are not asynchronous."""
    return torch.Stream(device) if device.type == "cuda" else None


def _move_aside(batch: Any, move: Move, device: torch.device, aside: torch.Stream) -> Any:
    aside.wait_stream(torch.accelerator.current_stream(device))
    with aside:
        return move(batch, device)
