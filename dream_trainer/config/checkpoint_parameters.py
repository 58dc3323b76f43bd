"""When a run is saved, which checkpoints stay, and from which one it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal, get_args

from dream_trainer.best_value import mode_of
from dream_trainer.checks import check_boolean, check_choice, check_directory, check_integer, check_positive
from dream_trainer.config.branch_parameters import BranchParameters
from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError
from dream_trainer.stores.store_path import as_path

WhenBusy = Literal["wait", "skip"]
OnSaveError = Literal["raise", "warn"]
Mode = Literal["min", "max"]


@parameters
class CheckpointParameters:
    """When to save, what to keep, and what to resume.

    Raises:
        ConfigError: A value cannot work.
    """

    directory: str | None = None
    """Directory, such as on a larger disk, under which checkpoints lie as `<project>/<group>/<experiment>`; the run's
    `checkpoints` is then a link to them. Such as `s3://bucket/path`, `gs://...`, `az://...`: an object store, to which
    they are sent from the run's directory. None: they lie there."""

    save_every_n_steps: int | None = None
    """Optimizer steps between checkpoints; None does not count steps."""
    save_every_n_minutes: float | None = None
    """Minutes between checkpoints, by rank 0's clock; None does not look at it."""
    save_every_n_epochs: int | None = 1
    """Epochs between checkpoints; 1 saves at the end of each, None does not count epochs."""
    save_on_best: bool = False
    """Whether to save after each validation whose `best_metric` is better than all before."""
    save_at_end: bool = True
    """Whether the last step is saved, also when a signal or a stop request ends the run."""
    save_on_exception: bool = True
    """Whether a single process saves its last finished step when an exception ends it."""

    local_directory: str | None = None
    """Directory on each host, such as `/dev/shm`, which is its memory: there every save leaves what this host's ranks
    hold, and a restart on the same hosts goes on from it and reads nothing else. Needs room for two states of the
    host's ranks. None: no local checkpoints."""
    save_local_every_n_steps: int | None = None
    """Optimizer steps between states that hosts keep in `local_directory` alone, more often than checkpoints are saved;
    none of them is a checkpoint of the run. None: every save leaves one, and there are no others."""

    save_frozen: bool = True
    """Whether checkpoints hold the parameters that take no gradients. False leaves out those that still have the values
    of the setup, such as the base under adapters or a frozen reference: each start has to load them again
    (`load_pretrained`), and one that has others than the checkpoint's, by digest, is refused."""

    async_save: bool = True
    """Whether checkpoints are written in the background: training pays the copy to the host's memory, which holds one
    more copy of this rank's state. False holds training until the checkpoint is on the disk."""
    when_busy: WhenBusy = "wait"
    """What a save does that comes due while the last one is still being written: "wait" for it, or "skip" this one."""
    on_save_error: OnSaveError = "raise"
    """What a save that failed does: "raise" ends the run at the next step, "warn" goes on to the next save."""

    keep_last: int | None = None
    """Newest checkpoints to keep. With none of the three rules all are kept; with any, what one of them names, and
    always the newest."""
    keep_every_n_steps: int | None = None
    """Checkpoints of steps divisible by this are kept for ever."""
    keep_best: int | None = None
    """Best checkpoints to keep, by `best_metric`."""
    best_metric: str | None = None
    """Name of a validation metric, such as "val/loss". NaN is never best. One that the first validation does not give
    is an error there, or before the first step if no validation could give it."""
    best_mode: Mode | None = None
    """Whether the smallest ("min") or the largest ("max") value is best. None asks the metric: its torchmetrics object,
    else its name, such as "val/loss" or "val/accuracy"; where neither says, the run does not begin."""

    resume: int | str | None = "auto"
    """"auto": the newest complete checkpoint of this run if there is one; "latest": that one, an error if there is
    none; "best": the best by `best_metric`; a step; a path of a checkpoint, or of another run, for its newest; None:
    start from step 0, an error if the run directory has checkpoints already."""
    branch: BranchParameters = field(default_factory=BranchParameters)
    """What goes along from the checkpoint of another run that `resume` names by its path."""
    init_from: str | None = None
    """Weights to start from if there is nothing to resume: whatever `load_weights` reads."""
    init_renames: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions and their replacements, applied in order to the names in `init_from`."""
    init_strict: bool = True
    """Whether names that are missing, unexpected or of another shape in `init_from` are an error."""

    def __post_init__(self) -> None:
        self._check_directory()
        for name, value in {
            "save_every_n_steps": self.save_every_n_steps,
            "save_every_n_epochs": self.save_every_n_epochs,
            "save_local_every_n_steps": self.save_local_every_n_steps,
            "keep_last": self.keep_last,
            "keep_every_n_steps": self.keep_every_n_steps,
            "keep_best": self.keep_best,
        }.items():
            if value is not None:
                check_integer(name, value, minimum=1, hint=" None turns it off.")
        check_directory("local_directory", self.local_directory, hint=" None keeps no local checkpoints.")
        if self.save_local_every_n_steps is not None and self.local_directory is None:
            raise ConfigError(
                f"save_local_every_n_steps={self.save_local_every_n_steps} does not say where. Set local_directory, "
                'such as "/dev/shm".'
            )
        for name in ("save_on_best", "save_at_end", "save_on_exception", "save_frozen", "async_save", "init_strict"):
            check_boolean(name, self._value(name))
        if not isinstance(self.best_metric, str | None):
            raise ConfigError(
                f'best_metric={self.best_metric!r} is not a string. Use one, such as "val/loss", or None.'
            )
        if not isinstance(self.init_from, str | PurePath | None):
            raise ConfigError(f"init_from={self.init_from!r} is not a string. Use the path of weights, or None.")
        if self.save_every_n_minutes is not None:
            check_positive("save_every_n_minutes", self.save_every_n_minutes)
        check_choice("when_busy", self.when_busy, get_args(WhenBusy))
        check_choice("on_save_error", self.on_save_error, get_args(OnSaveError))
        check_choice("best_mode", self.best_mode, (*get_args(Mode), None))
        for name, wanted in {
            "save_on_best": self.save_on_best,
            "keep_best": self.keep_best,
            "resume": self.resume == "best",
        }.items():
            if wanted and not self.best_metric:
                raise ConfigError(
                    f'{name}={self._value(name)!r} does not say by which metric. Set best_metric, such as "val/loss".'
                )
        if not isinstance(self.branch, BranchParameters):
            raise ConfigError(
                f"branch={self.branch!r} is of type {type(self.branch).__name__}. Use BranchParameters(...)."
            )
        is_step = isinstance(self.resume, int) and not isinstance(self.resume, bool) and self.resume >= 0
        if not (is_step or self.resume is None or (isinstance(self.resume, str) and self.resume)):
            raise ConfigError(
                f'resume={self.resume!r} is not understood. Use "auto", "latest", "best", a step, the path of a '
                "checkpoint, or None."
            )

    def known_best_mode(self, higher_is_better: bool | None = None) -> Mode:
        """Whether the smallest or the largest value of `best_metric` is best; "min" where there is no such metric.

        Args:
            higher_is_better: What its torchmetrics object says.

        Raises:
            ConfigError: Neither `best_mode` nor the metric says.
        """
        if self.best_metric is None:
            return self.best_mode or "min"
        return mode_of(
            self.best_metric,
            self.best_mode,
            higher_is_better=higher_is_better,
            named_by="best_metric",
            set_by="best_mode",
        )

    def _check_directory(self) -> None:
        if not isinstance(self.directory, str | PurePath) or not str(self.directory):
            check_directory("directory", self.directory, hint=" None keeps checkpoints in the run's own.")
            return
        try:
            as_path(str(self.directory))
        except ConfigError as error:
            raise ConfigError(f"checkpoint_parameters.directory: {error}") from None

    def _value(self, name: str) -> object:
        return vars(self)[name]

    @property
    def saves(self) -> bool:
        """Whether anything is saved without being asked for."""
        intervals = (self.save_every_n_steps, self.save_every_n_minutes, self.save_every_n_epochs)
        return self.save_at_end or self.save_on_best or any(value is not None for value in intervals)


@dataclass(kw_only=True)
class CheckpointConfigMixin:
    """Config of CheckpointMixin."""

    checkpoint_parameters: CheckpointParameters = field(default_factory=CheckpointParameters)
    """When to save, what to keep, and what to resume."""
