"""CheckpointMixin: when a checkpoint is saved, and from which one a run goes on.

It acts between windows, on all ranks at the same step: after a window's validation, so that the checkpoint carries its
metrics, and never inside a window. The state is copied to the host's memory, and a thread of each rank writes it while
training goes on. How a checkpoint lies on disk is dream_trainer.checkpoint's; what it holds of the trainer is in
trainer/saved_state.py; what is resumed, in trainer/resume.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from dream_trainer.checkpoint.background import Background
from dream_trainer.checkpoint.files import local_path, step_name
from dream_trainer.checkpoint.manifest import Manifest, list_checkpoints, verify_checkpoint
from dream_trainer.checkpoint.retention import Retention, is_better, retire
from dream_trainer.checkpoint.run_directory import claim, release
from dream_trainer.checkpoint.snapshot import Snapshot
from dream_trainer.checkpoint.staging import HostCopies
from dream_trainer.checkpoint.store import write_checkpoint
from dream_trainer.cleanup import followed_by, in_a_line
from dream_trainer.config.checkpoint_parameters import CheckpointConfigMixin, CheckpointParameters, OnSaveError
from dream_trainer.config.serialize import difference, to_dict
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError
from dream_trainer.trainer import saved_state
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.resume import leave_branch, load_initial_weights, resume

logger = logging.getLogger("dream_trainer")


class CheckpointMixin(AbstractTrainer):
    """Saves the whole run and resumes it exactly: the same command starts and restarts."""

    _config_class: ClassVar[type] = CheckpointConfigMixin

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        parameters: CheckpointParameters = config.checkpoint_parameters
        self._retention = Retention(
            keep_last=parameters.keep_last,
            keep_every_n_steps=parameters.keep_every_n_steps,
            keep_best=parameters.keep_best,
            metric=parameters.best_metric,
            mode=parameters.best_mode,
        )
        self._save_world: Ranks | None = None
        self._copies: HostCopies | None = None
        self._writing: Background[Path] = Background("checkpoint writer")
        self._warming: Background[None] = Background("checkpoint memory")
        self._warms = False  # whether memory for copies is still to be made
        self._copies_are_pending = False
        self._ranks_writing = 0
        self._last_save = time.monotonic()
        # The step that was saved last, or is being, and whether that checkpoint says that a validation is owed.
        self._saved: tuple[int, bool] | None = None
        self._validation_metrics: tuple[int, dict[str, float]] = (-1, {})
        self._best_value: float | None = None
        self._is_best = False
        # The step of another run's checkpoint that this run goes on from: its own from there on are of another branch.
        self._branched_at: int | None = None
        self._has_claim = False
        self._lacks_checkpoint = False  # whether a resume found none

    @property
    def checkpoint_dir(self) -> Path:
        """Where this run's checkpoints are."""
        return self.run_dir / "checkpoints"

    def checkpoints(self) -> list[Manifest]:
        """The run's whole checkpoints, oldest first."""
        return list_checkpoints(self.checkpoint_dir)

    def save_checkpoint(self) -> Path:
        """Saves the run as it is now and waits until that is on the disk; between windows, called by every rank.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: Some rank could not write; raised on every rank, earlier checkpoints are whole.
            NonFiniteError: A gradient norm was not finite and the policy says to raise.
        """
        self._refuse_inside_window("save_checkpoint")
        self._finish_save("raise")
        self._begin_save("raise")
        self._finish_save("raise")
        return self.checkpoint_dir / step_name(self.global_step)

    def load_checkpoint(self, path: str | Path) -> None:
        """Loads the checkpoint at `path` into this trainer; between windows, called by every rank.

        Launches and sets up on the first call. Newer checkpoints of this run are set aside (renamed, not deleted): the
        run goes on from this one and will write those steps anew. Every file's checksum is compared before anything is
        loaded.

        Raises:
            CheckpointError: It is damaged, or of another model, seed or global batch; raised on every rank.
        """
        source = local_path(path)
        self._start()
        self._refuse_inside_window("load_checkpoint")
        self._finish_save("raise")
        self._load(verify_checkpoint(source, world=self.world))

    def export(
        self,
        path: str | Path,
        *,
        model: str | None = None,
        weights: str = "model",
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> list[Path]:
        """Writes a model's weights as they are now in Hugging Face's layout; called by every rank.

        One tensor at a time is gathered. `dream-trainer checkpoints export` does the same for a checkpoint on the disk,
        without ranks or an accelerator.

        Args:
            path: Directory to write, or a `.safetensors`, `.pt` or `.pth` file.
            model: Name of the model; may be left out where there is one.
            weights: "model": its own; "ema" or "swa", or "ema.<n>" with several: the averages of that callback.
            dtype: Floating-point type to write; None leaves each as it is.
            max_shard_size: Bytes per file, as a number or such as "5GB".
            overwrite: Whether to replace what is there.

        Returns:
            The files written.

        Raises:
            CheckpointError: Rank 0 could not write; the same on every rank.
        """
        from dream_trainer.weights.trainer_export import export

        target = local_path(path)
        self._start()
        self._refuse_inside_window("export")
        return export(
            self,
            target,
            model,
            weights=weights,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
        )

    # -- start and resume

    def _finish_setup(self) -> None:
        super()._finish_setup()
        self._save_world = self.world.beside()
        if self.config.checkpoint_parameters.async_save:
            self._copies = HostCopies(self.world.device)
            self._warms = self.config.checkpoint_parameters.saves
        if not self.config.training_parameters.fast_dev_run:
            claim(self.run_dir, self.world)
            self._has_claim = True

    def _resume(self) -> None:
        super()._resume()
        parameters = self.config.checkpoint_parameters
        if self.config.training_parameters.fast_dev_run:
            return
        saved_state.check(self)
        if not resume(self.checkpoint_dir, parameters, self.world, self._load):
            load_initial_weights(self.named_models(), parameters, self.world)
            # Else nothing was expected there, or the weights are another run's.
            self._lacks_checkpoint = parameters.resume is not None and parameters.init_from is None

    @contextmanager
    def _validation_context(self) -> Iterator[None]:
        if self._lacks_checkpoint and not self._is_training and self.local_batches == 0:
            self._say_once(
                "no checkpoint",
                f"{self.checkpoint_dir} has no checkpoint: these weights are as setup left them. Check project, group "
                "and experiment; resume=None says that none is meant.",
            )
        with super()._validation_context():
            yield

    def _load(self, manifest: Manifest) -> None:
        self._lacks_checkpoint = False
        saved_state.restore(self, manifest)
        if manifest.path.parent.resolve() == self.checkpoint_dir.resolve():
            leave_branch(self.checkpoint_dir, manifest.step, self.world)
            self._saved = manifest.step, self.progress.owed is not None
        else:
            self._saved, self._branched_at = None, manifest.step
        self._validation_metrics = manifest.step, dict(manifest.metrics)
        self._say_what_changed(manifest)
        self._notify("on_load", manifest.path)

    def _say_what_changed(self, manifest: Manifest) -> None:
        if not self.world.is_main:
            return
        logger.info("resumed from %s at step %d", manifest.path, self.global_step)
        changed = difference(manifest.config, to_dict(self.config))
        if changed:
            logger.warning(
                "the config differs from the checkpoint's: %s. The new values hold, except where optimizers and "
                "schedulers saved the old ones, such as learning rates: those go on.",
                "; ".join(changed),
            )

    # -- when

    def _validated(self, metrics: dict[str, float]) -> None:
        super()._validated(metrics)
        parameters = self.config.checkpoint_parameters
        self._validation_metrics = self.global_step, dict(metrics)
        if parameters.best_metric is None:
            return
        if parameters.best_metric not in metrics:
            self._say_once(
                "best_metric",
                f"best_metric={parameters.best_metric!r} is not among the validation's metrics: {sorted(metrics)}.",
            )
        value = metrics.get(parameters.best_metric)
        if is_better(value, self._best_value, parameters.best_mode):
            self._best_value, self._is_best = value, parameters.save_on_best

    def _window_finished(self, *, is_last: bool) -> None:
        super()._window_finished(is_last=is_last)
        # After the first step, since optimizers make their state in it.
        if self._warms and self._copies is not None:
            self._warms = False
            self._warming.start(saved_state.warm(self, self._copies))

    def _save_if_due(self, *, stepped: bool, epoch_ended: bool, is_last: bool, requested: bool) -> None:
        super()._save_if_due(stepped=stepped, epoch_ended=epoch_ended, is_last=is_last, requested=requested)
        parameters = self.config.checkpoint_parameters
        if self.config.training_parameters.fast_dev_run:
            return
        every, epochs = parameters.save_every_n_steps, parameters.save_every_n_epochs
        # What all ranks heard of in an exchange that ended the run, or that came before the first step.
        requested |= self._agreement.save_is_owed
        self._agreement.save_is_owed = False
        must = requested or self._is_best or (is_last and parameters.save_at_end)
        due = (every is not None and stepped and self.global_step % every == 0) or (
            epoch_ended and epochs is not None and self.current_epoch % epochs == 0
        )
        if self._is_best:
            self._is_best = False
        if not (must or due or is_last):
            return
        # With nothing left to go on with, a state that is not on the disk is lost.
        on_error: OnSaveError = "raise" if is_last else parameters.on_save_error
        if must or (due and not self._skips()):
            self._finish_save(parameters.on_save_error)
            self._begin_save(on_error)
        if is_last:
            self._finish_save(on_error)
            self._warming.collect()

    def _skips(self) -> bool:
        """Whether the last save still runs on some rank, and this one is left out: the same on all ranks."""
        skips = self._ranks_writing > 0 and self.config.checkpoint_parameters.when_busy == "skip"
        if skips and self.world.is_main:
            logger.info("step %d is not saved: the last checkpoint is still being written", self.global_step)
        return skips

    def _saving_flags(self) -> tuple[bool, bool, bool]:
        due, saving, failed = super()._saving_flags()
        parameters = self.config.checkpoint_parameters
        minutes = parameters.save_every_n_minutes
        if minutes is not None and self.world.is_main:
            skips = parameters.when_busy == "skip" and (self._writing.is_busy or self._ranks_writing > 0)
            due |= not skips and time.monotonic() - self._last_save >= 60 * minutes
        if not self._ranks_writing:
            return due, saving, failed
        return due, saving or self._writing.is_busy, failed or self._writing.has_failed

    def _saving_heard(self, saving: int, failed: int) -> None:
        super()._saving_heard(saving, failed)
        were_writing = self._ranks_writing
        if were_writing == saving and not failed:
            return
        self._ranks_writing = saving
        if were_writing and (failed or not saving):
            self._finish_save(self.config.checkpoint_parameters.on_save_error)

    def _save_after_exception(self) -> None:
        super()._save_after_exception()
        is_whole = not self._accumulation.is_open
        if self.config.training_parameters.fast_dev_run or not is_whole or self.global_step == 0:
            return
        try:
            self._finish_save("warn")
            self._begin_save("raise")
            self._finish_save("raise")
        except Exception as error:
            self._save_was_lost()
            self._say_once(in_a_line(error), f"step {self.global_step} could not be saved: {in_a_line(error)}")

    # -- how

    def _begin_save(self, on_error: OnSaveError) -> None:
        """Takes a snapshot, and writes it or begins to; no save may be running."""
        assert self._save_world is not None  # made with everything else that a run needs
        self._warming.collect()
        self.settle()
        self._agreement.check_order()
        self._last_save = time.monotonic()  # the device has done its work: what follows is the save's
        step, owes = self.global_step, self.progress.owed is not None
        if self._saved in ((step, False), (step, owes)):
            return
        replace = self._saved == (step, True)
        try:
            if self._branched_at is not None:  # they would be taken for what is saved now
                leave_branch(self.checkpoint_dir, self._branched_at - 1, self.world)
                self._branched_at = None
            validated_at, metrics = self._validation_metrics
            snapshot = saved_state.snapshot(self, metrics if validated_at == step else {}, self._copies)
        except CheckpointError as error:
            self._save_failed(error, on_error)
            return
        finally:
            self._seconds_saving += time.monotonic() - self._last_save
        self._saved = step, owes
        self._ranks_writing = 1
        self._copies_are_pending = self._copies is not None
        self._writing.start(partial(self._write_snapshot, snapshot, self._save_world, replace=replace))
        if self._copies is None:
            self._finish_save(on_error)

    def _write_snapshot(self, snapshot: Snapshot, world: Ranks, *, replace: bool) -> Path:
        """In a thread: writes the checkpoint, then removes those that are no longer kept."""
        if self._copies is not None:
            self._copies.wait()
        path = write_checkpoint(self.checkpoint_dir, snapshot, world=world, replace=replace)
        if world.is_main and not self._retention.keeps_all:
            try:
                retire(self.checkpoint_dir, self._retention)
            except OSError as error:  # the new one is whole, and a later save tries again
                logger.warning("old checkpoints could not be removed: %s", error)
        return path

    def _finish_save(self, on_error: OnSaveError) -> None:
        """Waits for the save that is running, if there is one, and tells of it; on all ranks at the same step."""
        if self._writing.is_collected:
            return
        started = time.monotonic()
        try:
            with self._patience():
                path = self._writing.collect()
        except CheckpointError as error:
            self._save_failed(error, on_error)
        else:
            self._notify("on_save", path)
        finally:
            self._seconds_saving += time.monotonic() - started

    def _save_failed(self, error: CheckpointError, on_error: OnSaveError) -> None:
        self._saved = None
        self._save_was_lost()
        if on_error == "raise":
            raise error
        if self.world.is_main:
            logger.error("a checkpoint could not be saved; training goes on: %s", error)

    def _before_update(self) -> None:
        super()._before_update()
        if self._copies_are_pending and self._copies is not None:
            self._copies_are_pending = False
            self._copies.wait_before_update()

    def _close(self) -> None:
        # The directory is released last, since loggers write their last lines.
        with followed_by(self._release), followed_by(super()._close), followed_by(partial(self._finish_save, "raise")):
            self._warming.collect()

    def _release(self) -> None:
        if self._has_claim:
            self._has_claim = False
            release(self.run_dir)

    # -- state

    def _mixin_state(self) -> dict[str, Any]:
        return super()._mixin_state() | {"checkpoint": {"best_value": self._best_value}}

    def _load_mixin_state(self, state: dict[str, Any]) -> None:
        super()._load_mixin_state(state)
        self._best_value = state.get("checkpoint", {}).get("best_value")
