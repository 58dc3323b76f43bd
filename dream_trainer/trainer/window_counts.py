"""How much a window holds: its samples and tokens, counted on the host before it is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.data.sample_count import SampleCount, whole_number
from dream_trainer.data.stream import Window
from dream_trainer.errors import DataError

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def sizes_of(window: Window | None, count: SampleCount) -> list[int]:
    """Samples of each of a window's batches on this rank: as the user counts them, otherwise as the stream knows."""
    if window is None:
        return []
    if count.own is not None:
        return [count(batch) for batch in window.batches]
    assert window.sizes is not None  # a trainer's stream counts
    return window.sizes


def count_tokens(trainer: AbstractTrainer, window: Window | None) -> int:
    """Tokens of a window on this rank; 0 where its batches do not tell.

    Raises:
        DataError: Its batches do not tell, and the run ends by tokens.
        HookError: What a batch tells is not a whole number.
    """
    total = 0
    for batch in () if window is None else window.batches:
        tokens = trainer.batch_tokens(batch)
        if tokens is not None:
            total += whole_number(tokens, f"{type(trainer).__name__}.batch_tokens", batch)
        elif trainer.config.training_parameters.max_tokens is not None:
            raise DataError(
                f"max_tokens={trainer.config.training_parameters.max_tokens}, and batch_tokens gives None for a batch "
                f"of type {type(batch).__name__}: it has no documents, attention_mask or labels on the host. Override "
                "batch_tokens(batch) in your trainer."
            )
    return total
