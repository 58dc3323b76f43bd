"""When a run is saved, which checkpoints are kept, and which one it resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Literal

from dream_trainer.best_value import mode_of
from dream_trainer.checks import check_directory, check_instance, refuse
from dream_trainer.config.parameter_class import Directory, PositiveFloat, PositiveInt, parameters
from dream_trainer.errors import ConfigError
from dream_trainer.stores.store_path import as_path

OnSaveError = Literal["raise", "warn"]
Mode = Literal["min", "max"]
Word = Literal["keep", "new"]


@parameters
class BranchParameters:
    """State to take over from the checkpoint of `resume=<path>` besides the weights. Default: everything."""

    optimizer: Literal["keep", "moments", "new"] = "keep"
    """"keep": state and options, including the checkpoint's learning rate, weight decay and betas. "moments": only the
    state, such as Adam's moments, so this config's learning rate applies. "new": neither."""
    schedule: Literal["keep", "extend", "new"] = "keep"
    """"keep": the schedule continues at its step, in the form of this config. "extend": the same, but if a longer run
    stretches it, the rate stays at its value until the longer form has come down to it. "new": the schedule begins at
    its first step."""
    counters: Word = "keep"
    """Whether steps, epochs, samples, tokens, time, best values and the history continue, or begin at zero."""
    data: Word = "keep"
    """Whether the order of the data and the random states continue, or restart from this config's seed."""


ALL_KEPT = BranchParameters()  # a plain resume


def _check_path(name: str, value: object, *, hint: str) -> None:
    if not isinstance(value, PurePath):
        check_instance(name, value, str, hint=hint)


def _check_place(name: str, value: object, *, hint: str) -> None:
    """A directory, or an object store."""
    if not isinstance(value, str | PurePath) or not str(value):
        check_directory(name, value, hint=hint)
    try:
        as_path(str(value))
    except ConfigError as error:
        raise ConfigError(f"checkpoint_parameters.{name}: {error}") from None


@parameters
class CheckpointParameters:
    """When to save, and which checkpoints to keep and resume."""

    directory: Annotated[str, _check_place] | None = None
    """Directory, e.g. on a larger disk, that holds the checkpoints as `<project>/<group>/<experiment>`. The run's
    `checkpoints` is then a link to them. Or an object store (`s3://bucket/path`, `gs://...`, `az://...`): checkpoints
    are uploaded to it from the run's directory. None keeps them in the run's directory."""

    save_every_n_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints. None disables."""
    save_every_n_minutes: PositiveFloat | None = None
    """Minutes between checkpoints, by rank 0's clock. None disables."""
    save_every_n_epochs: PositiveInt | Literal["auto"] | None = "auto"
    """Epochs between checkpoints. "auto" is 1 unless steps or minutes between them are set. None disables."""
    save_on_best: bool = False
    """Whether to save after each validation whose `best_metric` is better than all before."""
    save_at_end: bool = True
    """Whether the last step is saved, also when a signal or a stop request ends the run."""
    save_on_exception: bool = True
    """Whether a single process saves its last finished step when an exception ends it."""

    local_directory: Directory | None = None
    """Directory on each host, such as `/dev/shm` (host memory). Every save also leaves the state of the host's ranks
    there, and a restart on the same hosts resumes from it without reading anything else. Needs room for two states of
    the host's ranks. None disables local checkpoints."""
    save_local_every_n_steps: PositiveInt | None = None
    """Optimizer steps between states that hosts only keep in `local_directory`, more often than checkpoints are saved.
    These are not checkpoints of the run. None keeps one such state per save."""

    save_frozen: bool = True
    """Whether checkpoints hold frozen parameters (without gradients). False omits those that still have the values
    of the setup, such as the base under adapters or a frozen reference. Each start must then load them again
    (`load_pretrained`), and a start with other values than the checkpoint's (by digest) raises an error."""

    async_save: bool = True
    """Whether checkpoints are written in the background. Training only waits for the copy to host memory, which takes
    one more copy of this rank's state. False blocks training until the checkpoint is on the disk."""
    when_busy: Literal["wait", "skip"] = "wait"
    """Policy for a save that is due while the last one is still being written: "wait" for it, or "skip" this one."""
    on_save_error: OnSaveError = "raise"
    """Policy for a failed save: "raise" ends the run at the next step, "warn" continues until the next save."""

    keep_last: PositiveInt | None = None
    """Number of newest checkpoints to keep. Without any of the three `keep_` rules all are kept. Otherwise those that
    any rule selects are kept, and always the newest."""
    keep_every_n_steps: PositiveInt | None = None
    """Checkpoints of steps divisible by this are kept forever. None disables."""
    keep_best: PositiveInt | None = None
    """Number of best checkpoints to keep, by `best_metric`. None disables."""
    best_metric: str | None = None
    """Name of a validation metric, such as "val/loss". `load_best`, `trainer.best` and EarlyStopping use it too. NaN is
    never best. If the first validation does not give the metric, it raises an error; if no validation could give it,
    the error comes before the first step."""
    best_mode: Mode | None = None
    """Whether the smallest ("min") or the largest ("max") value is best. None infers it from the metric's torchmetrics
    object, or from its name, such as "val/loss" or "val/accuracy". If neither tells, the run does not start."""

    resume: int | str | None = "auto"
    """Checkpoint to resume from. "auto": the newest complete one of this run, if any. "latest": the same, but an error
    if there is none. "best": the best by `best_metric`. A step. A path of a checkpoint, or of another run for its
    newest. None: start from step 0, an error if the run directory has checkpoints."""
    branch: BranchParameters = field(default_factory=BranchParameters)
    """State to take over if `resume` is the path of another run's checkpoint."""
    init_from: Annotated[str, _check_path] | None = None
    """Weights to start from if there is nothing to resume, in any form that `load_weights` reads."""
    init_renames: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions and their replacements, applied in order to the names in `init_from`."""
    init_strict: bool = True
    """Whether missing or unexpected names, or other shapes, in `init_from` raise an error."""

    def __post_init__(self) -> None:
        refuse(
            self.save_local_every_n_steps is not None and self.local_directory is None,
            f"save_local_every_n_steps={self.save_local_every_n_steps} does not say where. Set local_directory, "
            'such as "/dev/shm".',
        )
        by_metric = {
            "save_on_best": self.save_on_best,
            "keep_best": self.keep_best is not None,
            "resume": self.resume == "best",
        }
        for name, is_given in by_metric.items():
            refuse(
                is_given and not self.best_metric,
                f'{name}={vars(self)[name]!r} needs a metric. Set best_metric, such as "val/loss".',
            )
        is_step = isinstance(self.resume, int) and not isinstance(self.resume, bool) and self.resume >= 0
        refuse(
            not (is_step or self.resume is None or (isinstance(self.resume, str) and self.resume)),
            f'resume={self.resume!r} is not understood. Use "auto", "latest", "best", a step, the path of a '
            "checkpoint, or None.",
        )

    def known_best_mode(self, higher_is_better: bool | None = None) -> Mode:
        """Whether the smallest or the largest value of `best_metric` is best; "min" without a metric."""
        if self.best_metric is None:
            return self.best_mode or "min"
        return mode_of(self.best_metric, self.best_mode, higher_is_better, named_by="best_metric", set_by="best_mode")

    @property
    def keeps_all(self) -> bool:
        """Whether no rule says which checkpoints to keep, so that all of them are."""
        return self.keep_last is None and self.keep_every_n_steps is None and self.keep_best is None

    @property
    def epochs_between_saves(self) -> int | None:
        """`save_every_n_epochs`, with "auto" resolved."""
        if self.save_every_n_epochs == "auto":
            return 1 if self.save_every_n_steps is None and self.save_every_n_minutes is None else None
        return self.save_every_n_epochs

    @property
    def saves(self) -> bool:
        """Whether any save is automatic."""
        intervals = (self.save_every_n_steps, self.save_every_n_minutes, self.epochs_between_saves)
        return self.save_at_end or self.save_on_best or any(value is not None for value in intervals)


@dataclass(kw_only=True)
class CheckpointConfigMixin:
    checkpoint_parameters: CheckpointParameters = field(default_factory=CheckpointParameters)
