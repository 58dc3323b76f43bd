"""Cooperation: the hooks through which mixins take part in the loop, each declared once as a documented no-op.

`BaseTrainer` calls them at named phases. A mixin overrides those it needs and calls `super()`, so that any number of
mixins take part in any order; none knows of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from dream_trainer.checkpoint.saving import Saving

if TYPE_CHECKING:
    import torch.nn as nn

    from dream_trainer.compat.local_gradients import LocalGradients
    from dream_trainer.data.feed import WindowFeed
    from dream_trainer.trainer.agreement import Agreement
    from dream_trainer.trainer.step.accumulation import Accumulation


class Cooperation:
    """What mixins override, and what BaseTrainer alone gives them."""

    # Made by BaseTrainer when it starts, and the services that it gives to mixins.
    _feed: WindowFeed
    _accumulation: Accumulation
    _agreement: Agreement
    _ranks_are_even: bool  # whether every rank gets windows of the same size, and equally many
    _is_training: bool  # whether `fit` is at its loop
    _has_failed: bool  # whether an exception ended it
    _start: Callable[[], None]
    _failing_for_all: Callable[[], AbstractContextManager[None]]
    _last_window_is_done: Callable[[], bool]
    settle: Callable[[], None]
    _notify: Callable[..., None]
    _validation_step: Callable[[Any, int], Any]
    # What this rank's backwards gave to models of several ranks.
    _local_gradients: LocalGradients
    # CheckpointMixin puts one here that saves.
    _saver: Saving = Saving()

    @property
    def _seconds_saving(self) -> float:
        """Seconds that checkpoints have held the step path up in this process."""
        return self._saver.seconds

    def _setup_stages(self) -> list[tuple[str, str]]:
        """The setup order as (stage, reason) pairs, for `describe`."""
        return []

    def _finish_setup(self) -> None:
        """Models, data and optimizers are ready; loggers and checkpoints open here."""

    def _resume(self) -> None:
        """Loads the newest checkpoint, if the config says so."""

    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """What is called with each batch and its index in the place of `step`, a training or validation step."""
        return step

    def _sync_gradients(self, enabled: bool) -> None:
        """Whether the next backward reduces gradients over the data-parallel ranks."""

    def _average_statistics(self) -> None:
        """Makes running statistics equal on all ranks, after a window's last micro-batch; a collective."""

    def _reduce_what_waits(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduces gradients of `parameters` that no backward of the window has reduced; a collective."""

    def _reshard(self) -> None:
        """Puts back to shards what a forward left gathered."""

    def _forward_communicates(self) -> bool:
        """Whether a forward runs collectives, so that all ranks must run as many."""
        return False

    def _log_step(self, prefix: str, result: dict[str, Any], weight: Any) -> None:
        """Takes the result of a training micro-batch."""

    def _window_started(self) -> None:
        """Before each window's first micro-batch; not again when it runs again."""

    def _window_dropped(self) -> None:
        """A window's gradients were not finite, and it runs again: forget what it told."""

    def _window_finished(self, *, is_last: bool) -> None:
        """After each window and its events: loggers flush when due; `is_last` ends the run."""

    def _land(self) -> None:
        """Loggers write what is on its way to them; a collective, between windows."""

    def _validation_context(self) -> AbstractContextManager[None]:
        """Wraps a whole validation."""
        return nullcontext()

    def _validated(self, metrics: dict[str, float]) -> None:
        """Takes the exact metrics of a validation, before `post_val_epoch`."""

    def _tell_validated(self, metrics: dict[str, float]) -> None:
        """Calls everyone who listens to `post_val_epoch`."""
        self._notify("post_val_epoch", metrics)

    def _metrics_epoch_start(self, name: str) -> None:
        """A validation loader starts."""

    def _metrics_padding(self) -> AbstractContextManager[None]:
        """Wraps a padding batch, after which metrics must be as before."""
        return nullcontext()

    def _metrics_epoch_end(self, name: str) -> dict[str, float]:
        """A validation loader is done; returns further metrics."""
        return {}

    def _metrics_of_training(self) -> dict[str, Any]:
        """The metrics that training has updated on this rank, by name; a checkpoint keeps their state."""
        return {}

    def _save_if_due(self, *, stepped: bool, epoch_ended: bool, is_last: bool, requested: bool) -> None:
        """Saves a checkpoint when due; between windows, all ranks at the same step."""

    def _saving_flags(self) -> tuple[bool, bool, bool]:
        """For the pulse: whether a save is due by rank 0's clock, whether one is being written, and whether it
        failed."""
        return False, False, False

    def _saving_heard(self, saving: int, failed: int) -> None:
        """Takes on how many ranks a save is being written, and on how many it failed; between windows, on all ranks."""

    def _save_was_lost(self) -> None:
        """The save begun last did not get to the disk, and nobody has its state."""

    def _before_update(self) -> None:
        """Right before an optimizer changes parameters in place."""

    def _save_after_exception(self) -> None:
        """Training broke off in a world of one: save its last finished step, if that is still whole."""

    def _mixin_state(self) -> dict[str, Any]:
        """State of the mixins for checkpoints, by mixin."""
        return {}

    def _load_mixin_state(self, state: dict[str, Any]) -> None:
        """Takes back what `_mixin_state` gave."""

    def _close(self) -> None:
        """Releases what the mixins opened."""
