"""What the loop writes down at each batch: an object with slots, as this is the step path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dream_trainer.distributed.pulse import Flags
from dream_trainer.errors import StepError


def not_started(batch: Any, batch_idx: int) -> NoReturn:
    raise StepError("the trainer has not started. Call fit(), evaluate() or predict().")


@dataclass(slots=True)
class WindowState:
    training_step: Callable[[Any, int], Any] = not_started
    validation_step: Callable[[Any, int], Any] = not_started  # what validations call alike
    batch: Any = None  # the running micro-batch, on the device
    batch_samples: int = 0  # its samples on this rank
    sizes: list[int] = field(default_factory=list)  # samples of each of this rank's batches
    samples: int = 0  # the window's samples over all ranks
    tokens: int = 0  # the window's tokens over all ranks, until they are counted
    flags: Flags = field(default_factory=Flags)  # what all ranks said before it
    is_accumulating: bool = False  # whether further batches of the window follow the running one
    gradients_sync: bool = True  # whether the next backward reduces gradients over ranks
    first_batch_idx: int = 0  # number of its first batch in the epoch
    epoch_ends: bool = False  # whether the epoch ends with it
    validates: bool = False  # whether a validation follows it
    local_batches: int = 0  # training batches processed since this process started
