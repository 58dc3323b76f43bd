"""Where numbers go and how often, as configured."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal

from dream_trainer.checks import check_between, check_choice, check_names, refuse
from dream_trainer.config.parameter_class import PositiveInt, parameters

WandbMode = Literal["online", "offline", "disabled"]

# The group of entry points in which packages declare loggers of their own, as `name = "module:Class"`.
ENTRY_POINTS = "dream_trainer.loggers"
BUILT_IN = {
    "console": "dream_trainer.loggers.line_files:ConsoleLogger",
    "jsonl": "dream_trainer.loggers.line_files:JSONLLogger",
    "csv": "dream_trainer.loggers.line_files:CSVLogger",
    "tensorboard": "dream_trainer.loggers.tensorboard:TensorBoardLogger",
    "wandb": "dream_trainer.loggers.trackers:WandbLogger",
    "mlflow": "dream_trainer.loggers.trackers:MLflowLogger",
    "trackio": "dream_trainer.loggers.trackers:TrackioLogger",
    "images": "dream_trainer.loggers.media_files:ImageFilesLogger",
}


def logger_entry(name: str) -> EntryPoint:
    """Where the class of the logger called `name` is."""
    if name in BUILT_IN:
        return EntryPoint(name, BUILT_IN[name], ENTRY_POINTS)
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    check_choice("loggers", name, dict.fromkeys((*BUILT_IN, *installed)))
    return installed[name]


# Arguments of `wandb.init` and `trackio.init` that are given already, and by what.
_OF_THE_TRAINER = {
    "project": "the config's project",
    "group": "the config's group",
    "config": "the config itself",
    "resume": "CheckpointParameters.resume",
}
_OF_WANDB = {
    **_OF_THE_TRAINER,
    **{name: f"WandbParameters.{name}" for name in ("entity", "name", "tags", "mode")},
    "dir": "the run directory",
    "id": "kept in checkpoints, so that a resumed run goes on as the same one",
    "reinit": "the trainer's",
}


@parameters
class WandbParameters:
    """What Weights & Biases shows a run as. Project and group are the run's own."""

    entity: str | None = None
    """User or team that the run belongs to; None for the account's default."""
    name: str | None = None
    """Name of the run; None for the experiment's."""
    tags: Annotated[tuple[str, ...], partial(check_names, example="baseline")] = ()
    """Tags of the run."""
    mode: WandbMode | None = None
    """Where the run is written to: "online", "offline" (files for `wandb sync`) or "disabled" (nowhere). None leaves it
    to the environment variable WANDB_MODE, and is online without it."""
    init_arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `wandb.init` by name, such as notes, job_type, save_code or settings (a dict). Not those
    that are fields here, nor those that are the trainer's: project, group, config, dir, id, resume and reinit."""

    def __post_init__(self) -> None:
        _refuse_with_place(self.init_arguments, _OF_WANDB)


@parameters
class MLflowParameters:
    """Where MLflow keeps a run, and what it shows it as."""

    tracking_uri: str | None = None
    """The store: `sqlite:///runs/mlflow.db`, or a server's address. None leaves it to MLflow: the environment variable
    MLFLOW_TRACKING_URI, else mlflow.db in the working directory."""
    experiment: str | None = None
    """MLflow's experiment, which holds many runs; None for the config's project."""
    name: str | None = None
    """Name of the run; None for the config's group/experiment."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the run by name; the config's group is one anyway."""


@parameters
class TrackioParameters:
    """What Trackio shows a run as. Project and group are the run's own."""

    name: str | None = None
    """Name of the run; None for the config's group/experiment."""
    init_arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `trackio.init` by name, such as space_id, private or auto_log_cpu. Not name, which is a
    field here, nor those that are the trainer's: project, group, config and resume."""

    def __post_init__(self) -> None:
        _refuse_with_place(self.init_arguments, {"name": "TrackioParameters.name", **_OF_THE_TRAINER})


@parameters
class LoggerParameters:
    """Where numbers go and how often."""

    loggers: Annotated[tuple[str, ...], partial(check_names, example="jsonl")] = ("console", "jsonl")
    """Loggers to write to: "console" is a progress bar on a terminal and prints lines elsewhere; the others write in
    the run directory: "jsonl" metrics.jsonl, "csv" metrics.csv, "tensorboard" tensorboard/, "wandb" Weights & Biases,
    "images" image files in media/. "mlflow" and "trackio" write where those keep all runs. Other packages add names by
    the entry points `dream_trainer.loggers`."""
    log_every_n_steps: PositiveInt = 10
    """Optimizer steps between flushes; a flush waits for the device once, so 10 hides it."""
    history_lines: PositiveInt | None = 10_000
    """Lines that `trainer.history` keeps in memory, the newest; None keeps all. metrics.jsonl has every line."""
    straggler_factor: Annotated[float, partial(check_between, low=1.0, below=True)] | None = 1.3
    """A rank that is busy so many times as long as the median one in a step, and at least 20 ms longer, is slow: rank 0
    warns of it once, by its host and by what it is slow in (data or work). None: nobody looks."""
    straggler_lines: PositiveInt = 5
    """For how many lines of the log in a row it has to be slow."""
    strict: bool = False
    """Whether a logger that fails ends the run. False: it is reported once, and training goes on."""
    wandb: WandbParameters = field(default_factory=WandbParameters)
    """What Weights & Biases shows the run as."""
    mlflow: MLflowParameters = field(default_factory=MLflowParameters)
    """Where MLflow keeps the run, and what it shows it as."""
    trackio: TrackioParameters = field(default_factory=TrackioParameters)
    """What Trackio shows the run as."""

    def __post_init__(self) -> None:
        for name in self.loggers:
            logger_entry(name)
        refuse(
            len(set(self.loggers)) != len(self.loggers),
            f"loggers={self.loggers} names one logger twice. Name each once.",
        )


def _refuse_with_place(arguments: dict[str, Any], places: dict[str, str]) -> None:
    for name in arguments:
        refuse(
            name in places,
            f"init_arguments has {name!r}, which is {places.get(name)}. Set that, and leave it out here.",
        )


@dataclass(kw_only=True)
class LoggerConfigMixin:
    """Config of LoggerMixin."""

    logger_parameters: LoggerParameters = field(default_factory=LoggerParameters)
    """Where numbers go and how often."""
