"""Config of loggers and their intervals."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal

from dream_trainer.checks import check_choice, check_names, refuse
from dream_trainer.config.parameter_class import PositiveInt, parameters

# The group of entry points where packages declare their loggers, as `name = "module:Class"`.
ENTRY_POINTS = "dream_trainer.loggers"
BUILT_IN = {
    "console": "dream_trainer.loggers.line_files:ConsoleLogger",
    "jsonl": "dream_trainer.loggers.line_files:JSONLLogger",
    "csv": "dream_trainer.loggers.line_files:CSVLogger",
    "tensorboard": "dream_trainer.loggers.tensorboard:TensorBoardLogger",
    "wandb": "dream_trainer.loggers.trackers:WandbLogger",
    "mlflow": "dream_trainer.loggers.trackers:MLflowLogger",
    "trackio": "dream_trainer.loggers.trackers:TrackioLogger",
    "images": "dream_trainer.loggers.line_files:ImageFilesLogger",
}


def logger_entry(name: str) -> EntryPoint:
    """The entry point of the class of logger `name`."""
    if name in BUILT_IN:
        return EntryPoint(name, BUILT_IN[name], ENTRY_POINTS)
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    check_choice("loggers", name, dict.fromkeys((*BUILT_IN, *installed)))
    return installed[name]


def _refuse_arguments(names: set[str]) -> None:
    given = ", ".join(sorted(names))
    refuse(names, f"init_arguments has {given}, which the config gives: as a field here, or by its own names.")


@parameters
class WandbParameters:
    """How Weights & Biases shows a run. Project and group come from the config."""

    entity: str | None = None
    """User or team that the run belongs to. None for the account's default."""
    name: str | None = None
    """Name of the run. None for the experiment's."""
    tags: Annotated[tuple[str, ...], partial(check_names, example="baseline")] = ()
    """Tags of the run."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Where the run is written: "online", "offline" (files for `wandb sync`) or "disabled" (nowhere). None uses the
    environment variable WANDB_MODE, or "online" without it."""
    init_arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `wandb.init`, such as notes, job_type, save_code or settings (a dict). Not the fields here,
    nor arguments that the trainer sets: project, group, config, dir, id, resume and reinit."""

    def __post_init__(self) -> None:
        taken = {"project", "group", "config", "dir", "id", "resume", "reinit", "entity", "name", "tags", "mode"}
        _refuse_arguments(taken & self.init_arguments.keys())


@parameters
class MLflowParameters:
    """Where MLflow keeps a run, and how it shows it."""

    tracking_uri: str | None = None
    """The store: `sqlite:///runs/mlflow.db`, or a server's address. None uses the environment variable
    MLFLOW_TRACKING_URI, or mlflow.db in the working directory without it."""
    experiment: str | None = None
    """MLflow's experiment, which holds many runs. None for the config's project."""
    name: str | None = None
    """Name of the run. None for the config's group/experiment."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the run, as names and values. The config's group is always added."""


@parameters
class TrackioParameters:
    """How Trackio shows a run. Project and group come from the config."""

    name: str | None = None
    """Name of the run. None for the config's group/experiment."""
    init_arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `trackio.init`, such as space_id, private or auto_log_cpu. Not name, which is a field here,
    nor arguments that the trainer sets: project, group, config and resume."""

    def __post_init__(self) -> None:
        _refuse_arguments({"project", "group", "config", "resume", "name"} & self.init_arguments.keys())


@parameters
class LoggerParameters:
    """Loggers and their intervals."""

    loggers: Annotated[tuple[str, ...], partial(check_names, example="jsonl")] = ("console", "jsonl")
    """Loggers to write to. "console" is a progress bar on a terminal and prints lines elsewhere. These write to the run
    directory: "jsonl" metrics.jsonl, "csv" metrics.csv, "tensorboard" tensorboard/, "wandb" Weights & Biases, "images"
    image files in media/. "mlflow" and "trackio" write to their own store of all runs. Other packages add names through
    `dream_trainer.loggers` entry points."""
    log_every_n_steps: PositiveInt = 10
    """Optimizer steps between flushes. A flush waits for the device once; 10 hides that."""
    history_lines: PositiveInt | None = 10_000
    """Number of newest lines that `trainer.history` keeps in memory. None keeps all. metrics.jsonl has every line."""
    strict: bool = False
    """Whether a failing logger ends the run. False reports it once and continues training."""
    wandb: WandbParameters = field(default_factory=WandbParameters)
    mlflow: MLflowParameters = field(default_factory=MLflowParameters)
    trackio: TrackioParameters = field(default_factory=TrackioParameters)

    def __post_init__(self) -> None:
        for name in self.loggers:
            logger_entry(name)
        refuse(
            len(set(self.loggers)) != len(self.loggers),
            f"loggers={self.loggers} names one logger twice. Name each once.",
        )


@dataclass(kw_only=True)
class LoggerConfigMixin:
    logger_parameters: LoggerParameters = field(default_factory=LoggerParameters)
