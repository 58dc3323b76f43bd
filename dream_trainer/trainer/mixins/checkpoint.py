"""CheckpointMixin: when a checkpoint is saved, and from which one a run goes on.

It acts between windows, on all ranks at the same step: after a window's validation, so that the checkpoint carries its
metrics, and never inside a window. How a checkpoint lies on disk is dream_trainer.checkpoint's; what it holds of the
trainer is in trainer/saved_state.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dream_trainer.checkpoint.files import set_newer_aside, step_directories
from dream_trainer.checkpoint.manifest import Manifest, list_checkpoints, verify_checkpoint
from dream_trainer.checkpoint.run_directory import claim, release
from dream_trainer.checkpoint.world import on_all_ranks
from dream_trainer.config.serialize import difference, to_dict
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.trainer import saved_state
from dream_trainer.trainer.abstract import AbstractTrainer

logger = logging.getLogger("dream_trainer")


@dataclass(frozen=True, kw_only=True)
class CheckpointParameters:
    """When to save, and what to resume.

    Raises:
        ConfigError: A value cannot work.
    """

    save_every_n_steps: int | None = None
    """Optimizer steps between checkpoints; None does not count steps."""
    save_every_n_epochs: int | None = 1
    """Epochs between checkpoints; 1 saves at the end of each, None does not count epochs."""
    save_at_end: bool = True
    """Whether the last step is saved, also when a signal or a stop request ends the run."""
    resume: int | str | None = "auto"
    """"auto": the newest whole checkpoint of this run if there is one; a step; a checkpoint's path; None: start anew,
    an error if the run directory has checkpoints already."""

    def __post_init__(self) -> None:
        for name, value in {
            "save_every_n_steps": self.save_every_n_steps,
            "save_every_n_epochs": self.save_every_n_epochs,
        }.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}={value!r} is not a positive integer. Use one, or None to turn it off.")
        is_step = isinstance(self.resume, int) and not isinstance(self.resume, bool) and self.resume >= 0
        if not (is_step or self.resume is None or isinstance(self.resume, str)):
            raise ConfigError(
                f'resume={self.resume!r} is not understood. Use "auto", a step, the path of a checkpoint, or None.'
            )


@dataclass(kw_only=True)
class CheckpointConfigMixin:
    """Config of CheckpointMixin."""

    checkpoint_parameters: CheckpointParameters = field(default_factory=CheckpointParameters)
    """When to save, and what to resume."""


class CheckpointMixin(AbstractTrainer):
    """Saves the whole run and resumes it exactly: the same command starts and restarts."""

    _config_class: ClassVar[type] = CheckpointConfigMixin

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._last_metrics: dict[str, float] = {}
        self._has_claim = False

    @property
    def checkpoint_dir(self) -> Path:
        """Where this run's checkpoints are."""
        return self.run_dir / "checkpoints"

    def checkpoints(self) -> list[Manifest]:
        """The run's whole checkpoints, oldest first."""
        return list_checkpoints(self.checkpoint_dir)

    def save_checkpoint(self) -> Path:
        """Saves the run as it is now; between windows, called by every rank.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: Some rank could not write; raised on every rank, earlier checkpoints are whole.
            NonFiniteError: A gradient norm was not finite and the policy says to raise.
        """
        self._refuse_inside_window("save_checkpoint")
        self.settle()
        path = saved_state.write(self, self.checkpoint_dir, self._last_metrics)
        self._notify("on_save", path)
        return path

    def load_checkpoint(self, path: str | Path) -> None:
        """Loads the checkpoint at `path` into this trainer; between windows, called by every rank.

        Launches and sets up on the first call. Newer checkpoints of this run are set aside (renamed, not deleted): the
        run goes on from this one and will write those steps anew.

        Raises:
            CheckpointError: It is damaged, or of another model, seed or global batch; raised on every rank.
        """
        self._start()
        self._refuse_inside_window("load_checkpoint")
        self._load(verify_checkpoint(Path(path), world=self.world))

    def _load(self, manifest: Manifest) -> None:
        if manifest.path.parent.resolve() == self.checkpoint_dir.resolve():
            self._set_newer_aside(manifest.step)
        saved_state.restore(self, manifest)
        self._last_metrics = dict(manifest.metrics)
        self._say_what_changed(manifest)
        self._notify("on_load", manifest.path)

    # -- resume

    def _finish_setup(self) -> None:
        super()._finish_setup()
        if not self.config.training_parameters.fast_dev_run:
            claim(self.run_dir, self.world)
            self._has_claim = True

    def _close(self) -> None:
        super()._close()  # first, since loggers write their last lines
        if self._has_claim:
            self._has_claim = False
            release(self.run_dir)

    def _resume(self) -> None:
        super()._resume()
        if self.config.training_parameters.fast_dev_run:
            return
        saved_state.check(self)
        resume = self.config.checkpoint_parameters.resume
        if resume == "auto":
            self._resume_newest()
        elif resume is None:
            self._refuse_used_directory()
        elif isinstance(resume, int):
            self._load(verify_checkpoint(self._path_of_step(resume), world=self.world))
        else:
            self._load(verify_checkpoint(Path(resume), world=self.world))

    def _resume_newest(self) -> None:
        """Loads the newest checkpoint that is whole, chosen by rank 0; says which damaged ones it passes over."""
        candidates = [path for _, path in step_directories(self.checkpoint_dir)] if self.world.is_main else []
        for path in reversed(self.world.broadcast_object(candidates)):
            try:
                manifest = verify_checkpoint(path, world=self.world)
            except CheckpointError as error:
                if self.world.is_main:
                    logger.warning("passing over a damaged checkpoint: %s", error)
                continue
            self._load(manifest)
            return

    def _set_newer_aside(self, step: int) -> None:
        """Renames this run's checkpoints after `step`, which belong to a branch that the run leaves now."""
        found = on_all_ranks(
            self.world,
            "set newer checkpoints aside",
            lambda: set_newer_aside(self.checkpoint_dir, step) if self.world.is_main else [],
        )
        if found:
            logger.warning("going on from step %d; set aside: %s", step, ", ".join(path.name for path in found))

    def _refuse_used_directory(self) -> None:
        found = self.world.broadcast_object(len(step_directories(self.checkpoint_dir)) if self.world.is_main else 0)
        if found:
            raise ConfigError(
                f"resume=None starts anew, but {self.checkpoint_dir} holds {found} checkpoints of an earlier run. "
                'Use another experiment name, resume="auto", or move them away.'
            )

    def _path_of_step(self, step: int) -> Path:
        found = {manifest.step: manifest.path for manifest in self.checkpoints()}
        if step not in found:
            raise CheckpointError(
                f"{self.checkpoint_dir} has no whole checkpoint of step {step}. There are {sorted(found)}."
            )
        return found[step]

    def _say_what_changed(self, manifest: Manifest) -> None:
        if not self.world.is_main:
            return
        logger.info("resumed from %s at step %d", manifest.path, self.global_step)
        changed = difference(manifest.config, to_dict(self.config))
        if changed:
            logger.warning(
                "the config differs from the checkpoint's: %s. What optimizers and schedulers saved, learning rates "
                "too, stays as it was.",
                "; ".join(changed),
            )

    # -- save

    def _validated(self, metrics: dict[str, float]) -> None:
        super()._validated(metrics)
        self._last_metrics = dict(metrics)

    def _save_if_due(self, *, stepped: bool, epoch_ended: bool, is_last: bool, requested: bool) -> None:
        super()._save_if_due(stepped=stepped, epoch_ended=epoch_ended, is_last=is_last, requested=requested)
        parameters = self.config.checkpoint_parameters
        if self.config.training_parameters.fast_dev_run:
            return
        every, epochs = parameters.save_every_n_steps, parameters.save_every_n_epochs
        due = (
            requested
            or (is_last and parameters.save_at_end)
            or (every is not None and stepped and self.global_step % every == 0)
            or (epoch_ended and epochs is not None and self.current_epoch % epochs == 0)
        )
        if due:
            self.save_checkpoint()
