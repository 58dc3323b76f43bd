"""The interfaces of saving: what the loop calls, and the places beside the disk that a config may name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dream_trainer.checkpoint.manifest import Manifest, retire
from dream_trainer.checkpoint.store import Snapshot
from dream_trainer.config.checkpoint_parameters import CheckpointParameters
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import StepError
from dream_trainer.screen import logger


@dataclass(eq=False)
class Destination:
    """Where a run's checkpoints go: they stay in `directory`, on the disk. Every rank has one, and puts the same."""

    directory: Path
    retention: CheckpointParameters
    world: Ranks

    def begin(self, stage: Path) -> None:
        """Begins with the checkpoints that wait in `stage`; a collective."""

    def refuse_if_lost(self, world: Ranks) -> None:
        """Raises CheckpointError on all ranks if one cannot put more; `world` is the group of the writing thread."""

    def put(self, checkpoint: Path) -> None:
        """Takes a checkpoint that is whole on the disk, and removes those that are no longer kept."""
        if self.world.is_main:
            try:
                retire(self.directory, self.retention)
            except OSError as error:  # the new checkpoint is complete, and a later save tries again
                logger.warning("old checkpoints could not be removed: %s", error)

    def look_again(self) -> None:
        """Somebody else changed what is there; nothing may be on its way."""

    def finish(self) -> None:
        """Waits until everything is there; CheckpointError if it cannot be."""

    def end(self) -> None:
        """Nothing is put any more."""


class HostSaves:
    """The newest state in the memory of each host, after a run's newest checkpoint: none. Methods are collectives."""

    def find(self, newest: Manifest) -> Manifest | None:
        """This host's part of the newest save after `newest` that is whole on every host; None if there is none."""

    def loaded(self, manifest: Manifest, *, is_own: bool) -> None:
        """The run resumes from a checkpoint: one found by `find`, another one of this run, or another run's."""

    def begin(self) -> None:
        """Training begins: only the save it resumed from stays."""

    def follow(self, path: Path) -> None:
        """The run has a new checkpoint at `path`: saves kept before it will not be used."""

    def write(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot instead of the last one. If a host cannot, this warns, and the last one stays."""

    def clear(self) -> None:
        """The run is finished: nothing of it stays."""


class Saving:
    """Interface that the loop calls between windows, on all ranks at the same step. It never saves; `Saver` does."""

    seconds: float = 0.0  # that training waited for saves in this process
    lacks_checkpoint: bool = False  # a resume found none where one was possible
    local = HostSaves()

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

    def wait_for_copies(self) -> None:
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

    def close(self) -> None:
        """Waits for everything that threads are doing."""

    def release(self) -> None:
        """Releases the run directory after the last write to it."""
