"""What the loop writes down at each batch: an object with slots, as this is the step path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dream_trainer.distributed.pulse import Flags
from dream_trainer.errors import StepError


def not_started(batch: Any, batch_idx: int) -> NoReturn:
    """The step of a trainer that has not started.

    Raises:
        StepError: Always.
    """
    raise StepError("the trainer has not started. Call fit(), evaluate() or predict().")


@dataclass(slots=True)
class WindowState:
    """The accumulation window that runs, or ran last.

    Attributes:
        training_step: What is called with each batch and its index: the user's, wrapped by mixins.
        validation_step: What validations call alike.
        batch: The running micro-batch, on the device.
        batch_samples: Its samples on this rank.
        sizes: Samples of each of this rank's batches.
        samples: The window's samples over all ranks.
        tokens: The window's tokens over all ranks, until they are counted.
        flags: What all ranks said before it.
        is_accumulating: Whether further batches of the window follow the running one.
        gradients_sync: Whether the next backward reduces gradients over ranks.
        first_batch_idx: Number of its first batch in the epoch.
        epoch_ends: Whether the epoch ends with it.
        validates: Whether a validation follows it.
        local_batches: Training batches processed since this process started.
    """

    training_step: Callable[[Any, int], Any] = not_started
    validation_step: Callable[[Any, int], Any] = not_started
    batch: Any = None
    batch_samples: int = 0
    sizes: list[int] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    flags: Flags = field(default_factory=Flags)
    is_accumulating: bool = False
    gradients_sync: bool = True
    first_batch_idx: int = 0
    epoch_ends: bool = False
    validates: bool = False
    local_batches: int = 0
