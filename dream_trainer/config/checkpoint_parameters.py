"""When a run is saved, which checkpoints stay, and from which one it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Literal

from dream_trainer.best_value import mode_of
from dream_trainer.checks import check_directory, check_string, refuse
from dream_trainer.config.parameter_class import Directory, PositiveFloat, PositiveInt, parameters
from dream_trainer.errors import ConfigError
from dream_trainer.stores.store_path import as_path

WhenBusy = Literal["wait", "skip"]
OnSaveError = Literal["raise", "warn"]
Mode = Literal["min", "max"]
OptimizerWord = Literal["keep", "moments", "new"]
ScheduleWord = Literal["keep", "extend", "new"]
Word = Literal["keep", "new"]


@parameters
class BranchParameters:
    """What goes along from the checkpoint that `resume=<path>` names, besides the weights; by default all of it."""

    optimizer: OptimizerWord = "keep"
    """"keep": state and options, so that the checkpoint's learning rate, weight decay and betas go on; "moments": the
    state, such as Adam's moments, under the options of this config: so a new learning rate holds; "new": neither."""
    schedule: ScheduleWord = "keep"
    """"keep": the schedule goes on at its step, in the form that this config gives it; "extend": the same, but where a
    longer run stretches it, the rate stays where it was until the longer form has come down to it; "new": the schedule
    begins at its first step."""
    counters: Word = "keep"
    """Whether steps, epochs, samples, tokens, time, best values and the history go on, or begin at zero."""
    data: Word = "keep"
    """Whether the order of the data and the random states go on where they were, or begin anew, from this config's
    seed."""


ALL_KEPT = BranchParameters()  # a plain resume


def _check_path(name: str, value: object, *, hint: str) -> None:
    if not isinstance(value, PurePath):
        check_string(name, value, hint=hint)


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
    """When to save, what to keep, and what to resume.

    Raises:
        ConfigError: A value cannot work.
    """

    directory: Annotated[str, _check_place] | None = None
    """Directory, such as on a larger disk, under which checkpoints lie as `<project>/<group>/<experiment>`; the run's
    `checkpoints` is then a link to them. Such as `s3://bucket/path`, `gs://...`, `az://...`: an object store, to which
    they are sent from the run's directory. None: they lie there."""

    save_every_n_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints; None does not count steps."""
    save_every_n_minutes: PositiveFloat | None = None
    """Minutes between checkpoints, by rank 0's clock; None does not look at it."""
    save_every_n_epochs: PositiveInt | Literal["auto"] | None = "auto"
    """Epochs between checkpoints; "auto" is 1 unless steps or minutes between them are set, None does not count
    epochs."""
    save_on_best: bool = False
    """Whether to save after each validation whose `best_metric` is better than all before."""
    save_at_end: bool = True
    """Whether the last step is saved, also when a signal or a stop request ends the run."""
    save_on_exception: bool = True
    """Whether a single process saves its last finished step when an exception ends it."""

    local_directory: Directory | None = None
    """Directory on each host, such as `/dev/shm`, which is its memory: there every save leaves what this host's ranks
    hold, and a restart on the same hosts goes on from it and reads nothing else. Needs room for two states of the
    host's ranks. None: no local checkpoints."""
    save_local_every_n_steps: PositiveInt | None = None
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

    keep_last: PositiveInt | None = None
    """Newest checkpoints to keep. With none of the three rules all are kept; with any, what one of them names, and
    always the newest."""
    keep_every_n_steps: PositiveInt | None = None
    """Checkpoints of steps divisible by this are kept for ever."""
    keep_best: PositiveInt | None = None
    """Best checkpoints to keep, by `best_metric`."""
    best_metric: str | None = None
    """Name of a validation metric, such as "val/loss", which `load_best`, `trainer.best` and EarlyStopping go by too.
    NaN is never best. One that the first validation does not give
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
    init_from: Annotated[str, _check_path] | None = None
    """Weights to start from if there is nothing to resume: whatever `load_weights` reads."""
    init_renames: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions and their replacements, applied in order to the names in `init_from`."""
    init_strict: bool = True
    """Whether names that are missing, unexpected or of another shape in `init_from` are an error."""

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
                f'{name}={vars(self)[name]!r} does not say by which metric. Set best_metric, such as "val/loss".',
            )
        is_step = isinstance(self.resume, int) and not isinstance(self.resume, bool) and self.resume >= 0
        refuse(
            not (is_step or self.resume is None or (isinstance(self.resume, str) and self.resume)),
            f'resume={self.resume!r} is not understood. Use "auto", "latest", "best", a step, the path of a '
            "checkpoint, or None.",
        )

    def known_best_mode(self, higher_is_better: bool | None = None) -> Mode:
        """Whether the smallest or the largest value of `best_metric` is best; "min" where there is no such metric."""
        if self.best_metric is None:
            return self.best_mode or "min"
        return mode_of(
            self.best_metric,
            self.best_mode,
            higher_is_better=higher_is_better,
            named_by="best_metric",
            set_by="best_mode",
        )

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
        """Whether anything is saved without being asked for."""
        intervals = (self.save_every_n_steps, self.save_every_n_minutes, self.epochs_between_saves)
        return self.save_at_end or self.save_on_best or any(value is not None for value in intervals)


@dataclass(kw_only=True)
class CheckpointConfigMixin:
    """Config of CheckpointMixin."""

    checkpoint_parameters: CheckpointParameters = field(default_factory=CheckpointParameters)
    """When to save, what to keep, and what to resume."""
