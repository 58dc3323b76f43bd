"""Counters: what a run has done so far, as checkpoints keep it; completed windows and epochs are counted here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dream_trainer.data.stream import DataPosition


@dataclass(frozen=True, slots=True)
class Owed:
    """What is left to do after the window completed last."""

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
