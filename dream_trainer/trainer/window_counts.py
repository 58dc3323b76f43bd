"""How much a window holds: its samples and tokens, counted on the host before it is trained."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from dream_trainer.data.stream import Window
from dream_trainer.errors import DataError, HookError

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def count_samples(window: Window | None) -> int:
    """Samples of a window on this rank; 0 where the window tells those of all ranks."""
    return 0 if window is None or window.samples is not None or window.sizes is None else sum(window.sizes)


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
            total += _whole_number(tokens, trainer, batch)
        elif trainer.config.training_parameters.max_tokens is not None:
            raise DataError(
                f"max_tokens={trainer.config.training_parameters.max_tokens}, and batch_tokens gives None for a batch "
                f"of type {type(batch).__name__}: it has no documents, attention_mask or labels on the host. Override "
                "batch_tokens(batch) in your trainer."
            )
    return total


def _whole_number(tokens: Any, trainer: AbstractTrainer, batch: Any) -> int:
    """`tokens` as an int: a tensor would be counted in place, and be no number in the log and in checkpoints."""
    try:
        return index(tokens)
    except TypeError:
        raise HookError(
            f"{type(trainer).__name__}.batch_tokens gave {tokens!r} for a batch of type {type(batch).__name__}. Give a "
            "whole number, such as int(mask.sum())."
        ) from None
