"""Where numbers go and how often, as configured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, Literal, get_args

from dream_trainer.checks import check_between, check_choice, check_names, did_you_mean, refuse
from dream_trainer.config.parameter_class import PositiveInt, parameters

LoggerName = Literal["console", "jsonl", "csv", "tensorboard", "wandb", "mlflow", "trackio", "images"]
WandbMode = Literal["online", "offline", "disabled"]

# The packages that a logger imports, and the extra of this package that installs it.
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "tensorboard": (("tensorboard", "google_crc32c"), "tensorboard"),
    "wandb": (("wandb",), "wandb"),
    "mlflow": (("mlflow", "sqlalchemy", "alembic", "PIL"), "mlflow"),
    "trackio": (("trackio", "PIL"), "trackio"),
    "images": (("PIL",), "images"),
}

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

    loggers: Annotated[tuple[LoggerName, ...], partial(check_names, example="jsonl")] = ("console", "jsonl")
    """Loggers to write to: "console" prints lines; the others write in the run directory: "jsonl" metrics.jsonl, "csv"
    metrics.csv, "tensorboard" tensorboard/, "wandb" Weights & Biases, "images" image files in media/. "mlflow" and
    "trackio" write where those keep all runs."""
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
            check_choice("loggers", name, get_args(LoggerName))
        refuse(
            len(set(self.loggers)) != len(self.loggers),
            f"loggers={self.loggers} names one logger twice. Name each once.",
        )


def check_loggers(chosen: LoggerParameters) -> None:
    """Checks that what the loggers need is installed, without importing it, and that W&B and Trackio know the arguments
    that they are given.

    Raises:
        ConfigError: A package is missing; the message names the extra to install. Or an argument is unknown.
    """
    names = chosen.loggers
    for name in names:
        packages, extra = _NEEDS.get(name, ((), ""))
        for package in packages:
            refuse(
                find_spec(package) is None,
                f'loggers={names} names "{name}", whose package {package} is not installed. '
                f'Install it with pip install "dream-trainer[{extra}]", or leave "{name}" out.',
            )
    if "wandb" in names and chosen.wandb.init_arguments:
        import wandb

        _refuse_unknown(chosen.wandb.init_arguments, "wandb.init", wandb.init)
    if "trackio" in names and chosen.trackio.init_arguments:
        import trackio

        _refuse_unknown(chosen.trackio.init_arguments, "trackio.init", trackio.init)


def _refuse_with_place(arguments: dict[str, Any], places: dict[str, str]) -> None:
    for name in arguments:
        refuse(
            name in places,
            f"init_arguments has {name!r}, which is {places.get(name)}. Set that, and leave it out here.",
        )


def _refuse_unknown(arguments: dict[str, Any], function_name: str, function: Callable[..., Any]) -> None:
    known = list(inspect.signature(function).parameters)
    for name in arguments:
        refuse(
            name not in known,
            f"init_arguments has {name!r}, which {function_name} does not take. {did_you_mean(name, known)}",
        )


@dataclass(kw_only=True)
class LoggerConfigMixin:
    """Config of LoggerMixin."""

    logger_parameters: LoggerParameters = field(default_factory=LoggerParameters)
    """Where numbers go and how often."""
