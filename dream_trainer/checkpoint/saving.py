"""What a trainer's loop asks of what saves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dream_trainer.checkpoint.manifest import Manifest


class Saving:
    """What the loop tells and asks between windows, on all ranks at the same step. This one never saves; `Saver` does.

    Attributes:
        seconds: Seconds for which saves have held training up, in this process.
        lacks_checkpoint: Whether a resume found none where there could have been one, so that the weights are as setup
            left them.
    """

    seconds: float = 0.0
    lacks_checkpoint: bool = False

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk on this rank."""
        return False

    def window_finished(self) -> None:
        """A window is through, and optimizers have made their state."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation after `step` gave `metrics`."""

    def save_if_due(self, *, step: int | None, epoch: int | None, is_last: bool, requested: bool) -> None:
        """Saves a checkpoint when one is due.

        Args:
            step: Optimizer steps completed, if the window counted as one.
            epoch: Epochs completed, if one just ended.
            is_last: Whether the run ends here. Then it waits until everything is on the disk.
            requested: Whether a save was asked for, as all ranks know.
        """

    def flags(self) -> tuple[bool, bool, bool]:
        """For the pulse: whether a save is due by rank 0's clock, whether one is being written on this rank, and
        whether that failed."""
        return False, False, False

    def heard(self, saving: int, failed: int) -> None:
        """Takes on how many ranks a save is being written, and on how many it failed."""

    def before_update(self) -> None:
        """Right before parameters are changed in place."""

    def save_after_exception(self, step: int) -> None:
        """Training broke off in a world of one, after `step`, whose state is still whole: saves that."""

    def save(self) -> None:
        """Saves now, and waits until that is on the disk.

        Raises:
            CheckpointError: Some rank could not write; the same on every rank.
        """

    def finish(self) -> None:
        """Waits for the save that is running, if there is one.

        Raises:
            CheckpointError: Some rank could not write; the same on every rank.
        """

    def goes_on_from(self, manifest: Manifest, *, owes: bool) -> None:
        """A checkpoint was loaded: what this run has saved after it belongs to a branch that it leaves; a collective.

        Args:
            manifest: The checkpoint's.
            owes: Whether something was still to be done after its last window.
        """

    def close(self) -> None:
        """Waits for all that threads are doing.

        Raises:
            CheckpointError: It could not be written; the same on every rank.
        """

    def release(self) -> None:
        """Lets go of the run directory, when nobody writes to it any more."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave."""
