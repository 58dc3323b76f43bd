"""The schedulers inside PyTorch's schedulers, which it keeps under a private name."""

from __future__ import annotations

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR


def inner_schedulers(scheduler: LRScheduler | ReduceLROnPlateau) -> list[LRScheduler]:
    """All schedulers that a SequentialLR or ChainedScheduler is made of, at any depth."""
    if not isinstance(scheduler, SequentialLR | ChainedScheduler):
        return []
    return [part for one in scheduler._schedulers for part in (one, *inner_schedulers(one))]
