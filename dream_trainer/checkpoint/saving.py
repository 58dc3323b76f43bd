"""The trainer loop's interface to the object that saves it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dream_trainer.checkpoint.local_checkpoints import LocalCheckpoints
from dream_trainer.errors import StepError


class Saving:
    """Interface that the loop calls between windows, on all ranks at the same step. It never saves; `Saver` does."""

    seconds: float = 0.0  # that training waited for saves in this process
    lacks_checkpoint: bool = False  # a resume found none where one was possible
    local: LocalCheckpoints | None = None

    @property
    def is_overtaken(self) -> bool:
        """Whether another trainer of this process has trained this run since this one did or loaded it."""
        return False

    def expect_best_metric(self, metrics: Collection[str]) -> None:
        """Receives a validation's or sanity check's metrics; raises ConfigError if the first lacks `best_metric`."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation after `step` gave `metrics`."""

    def save_if_due(self, *, step: int | None, epoch: int | None, is_last: bool, requested: bool) -> None:
        """Saves a checkpoint when one is due."""

    def flags(self) -> tuple[bool, bool, bool]:
        """For the pulse: whether a save is due by rank 0's clock, this rank is writing one, and that failed."""
        return False, False, False

    def heard(self, saving: int, failed: int) -> None:
        """Receives the number of ranks that are writing a save, and of those on which it failed."""

    def before_update(self) -> None:
        """Right before parameters are changed in place."""

    def save_after_exception(self, step: int) -> None:
        """Saves `step`, after which training raised, in a world of one: that step's state is still complete."""

    def save(self) -> None:
        """Saves now, replacing a checkpoint of this step if there is one, and waits for the disk."""
        raise StepError("save_checkpoint() was called before the trainer is set up. Call it in post_setup or later.")

    def finish(self) -> None:
        """Waits for the save that is running, if there is one."""

    def goes_on_from(
        self, step: int, metrics: Mapping[str, Any], *, is_own: bool, has_pending_work: bool, is_local: bool = False
    ) -> None:
        """A checkpoint was loaded; this run's later saves are a branch that it abandons when training continues."""

    def begin_training(self) -> None:
        """Training continues from the run's present position; a collective."""

    def wait_until_sent(self) -> None:
        """Waits until the object store has everything; every rank calls it while nothing is written."""

    def close(self) -> None:
        """Waits for everything that threads are doing."""

    def release(self) -> None:
        """Releases the run directory after the last write to it."""
