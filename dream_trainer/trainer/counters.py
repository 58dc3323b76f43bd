"""Counters: what a run has done so far, as checkpoints keep it; completed windows and epochs are counted here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dream_trainer.data.stream import DataPosition


@dataclass(frozen=True, slots=True)
class Owed:
    """What is left to do after the window completed last.

    Attributes:
        stepped: Whether it counted as an optimizer step.
        epoch_ended: Whether the end of its epoch is left to do.
        validates: Whether a validation is left to do.
    """

    stepped: bool
    epoch_ended: bool
    validates: bool


@dataclass(slots=True)
class Counters:
    """How far a run is. Windows and epochs are counted when they are complete, before any listener is called.

    Attributes:
        global_step: Accumulation windows completed with at least one `step()`.
        current_epoch: Epochs completed.
        batch_idx: Micro-batches of this rank completed in the current epoch.
        epoch_steps: Windows completed in the current epoch.
        samples_seen: Samples consumed by all ranks.
        tokens_seen: Tokens of the batches consumed by all ranks, as `batch_tokens` counts them.
        skipped_steps: Optimizer steps skipped because the gradient norm was not finite or the total weight was zero.
        elapsed_seconds: Seconds of training, those of earlier processes included, at the last validation or save.
        data: Place in the training data: the end of the last window.
        is_pass_over: Whether that window was the last of its pass over the data.
        loader_was_replaced: Whether `train_dataloader` was assigned again since the run began.
        owed: A validation or an epoch's end that is left to do after the last window; a resume does it first.
    """

    global_step: int = 0
    current_epoch: int = 0
    batch_idx: int = 0
    epoch_steps: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    skipped_steps: int = 0
    elapsed_seconds: float = 0.0
    data: DataPosition = field(default_factory=lambda: DataPosition(0, 0, 0))
    is_pass_over: bool = False
    loader_was_replaced: bool = False
    owed: Owed | None = None

    def finish_window(self, *, stepped: bool, samples: int, tokens: int, end: DataPosition) -> None:
        """Counts a completed window.

        Args:
            stepped: Whether `step()` ran in it.
            samples: Samples of all ranks in it.
            tokens: Tokens of all ranks in it.
            end: Place in the data after it.
        """
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
        """All counters as plain data."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        values = dict(state)
        self.data = DataPosition(**values.pop("data"))
        owed = values.pop("owed", None)
        self.owed = None if owed is None else Owed(**owed)
        for name, value in values.items():
            setattr(self, name, value)
