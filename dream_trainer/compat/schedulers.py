"""The schedulers inside PyTorch's schedulers, which it keeps under a private name."""

from __future__ import annotations

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR


def inner_schedulers(scheduler: LRScheduler | ReduceLROnPlateau) -> list[LRScheduler]:
    """All schedulers that a SequentialLR or ChainedScheduler is made of, at any depth."""
    if not isinstance(scheduler, SequentialLR | ChainedScheduler):
        return []
    return [part for one in scheduler._schedulers for part in (one, *inner_schedulers(one))]


def steps_taken(scheduler: LRScheduler | ReduceLROnPlateau) -> int:
    """How often a scheduler was stepped since its beginning; 0 of one of a user's that keeps no count.

    A ChainedScheduler has no count but its parts'.
    """
    if isinstance(scheduler, ChainedScheduler):
        return max(steps_taken(part) for part in scheduler._schedulers)
    steps: int = vars(scheduler).get("last_epoch", 0)
    return steps
