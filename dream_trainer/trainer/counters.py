"""Counters: a run's progress, as checkpoints keep it. Completed windows and epochs are counted here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from dream_trainer.data.stream import DataPosition
from dream_trainer.distributed.pulse import Flags
from dream_trainer.errors import StepError


@dataclass(frozen=True, slots=True)
class Owed:
    """Work that remains after the last completed window."""

    stepped: bool  # whether it counted as an optimizer step
    epoch_ended: bool  # whether the end of its epoch is left to do
    validates: bool  # whether a validation is left to do


@dataclass(slots=True)
class Counters:
    """How far a run is. Windows and epochs are counted when they are complete, before any listener is called."""

    global_step: int = 0  # accumulation windows completed with at least one `step()`
    current_epoch: int = 0
    batch_idx: int = 0  # micro-batches of this rank completed in the current epoch
    epoch_steps: int = 0  # windows completed in the current epoch
    samples_seen: int = 0  # samples consumed by all ranks
    tokens_seen: int = 0  # tokens of the batches consumed by all ranks, as `batch_tokens` counts them
    skipped_steps: int = 0  # norm not finite, or the total weight zero
    elapsed_seconds: float = 0.0  # of training, earlier processes included, at the last validation or save
    data: DataPosition = field(default_factory=lambda: DataPosition(0, 0, 0))  # the end of the last window
    is_pass_over: bool = False  # whether that window was the last of its pass over the data
    loader_was_replaced: bool = False  # whether `train_dataloader` was assigned again since the run began
    owed: Owed | None = None  # a resume does it first

    def finish_window(self, *, stepped: bool, samples: int, tokens: int, end: DataPosition) -> None:
        self.global_step += stepped
        self.epoch_steps += 1
        self.samples_seen += samples
        self.tokens_seen += tokens
        # Only here are the samples of all ranks known where a loader is not ours, and a resume needs them: a batch may
        # hold another number of them by then.
        before = self.data.samples if self.data.epoch == end.epoch else 0
        self.data = end if end.samples else DataPosition(end.epoch, before + samples, end.batches)

    def finish_epoch(self) -> None:
        """Counts a completed epoch and starts the next."""
        self.current_epoch += 1
        self.epoch_steps = 0
        self.batch_idx = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        values = dict(state)
        self.data = DataPosition(**values.pop("data"))
        owed = values.pop("owed", None)
        self.owed = None if owed is None else Owed(**owed)
        for name, value in values.items():
            setattr(self, name, value)


# -- What the loop writes down at each batch: an object with slots, as this is the step path.


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
    flags: Flags = field(default_factory=Flags)  # the flags that all ranks exchanged before it
    is_accumulating: bool = False  # whether further batches of the window follow the running one
    gradients_sync: bool = True  # whether the next backward reduces gradients over ranks
    first_batch_idx: int = 0  # number of its first batch in the epoch
    epoch_ends: bool = False  # whether the epoch ends with it
    validates: bool = False  # whether a validation follows it
    local_batches: int = 0  # training batches processed since this process started
    validation_seconds: float = 0.0  # of validations in this process
