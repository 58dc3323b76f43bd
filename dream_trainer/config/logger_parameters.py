"""Where numbers go and how often, as configured."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal, get_args

from dream_trainer.checks import check_boolean, check_choice, check_integer, check_names
from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError

LoggerName = Literal["console", "jsonl", "csv", "tensorboard", "wandb", "images"]
WandbMode = Literal["online", "offline", "disabled"]

# The packages that a logger imports, and the extra of this package that installs it.
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "tensorboard": (("tensorboard", "google_crc32c"), "tensorboard"),
    "wandb": (("wandb",), "wandb"),
    "images": (("PIL",), "images"),
}


@parameters
class WandbParameters:
    """What Weights & Biases shows a run as. Project and group are the run's own.

    Raises:
        ConfigError: The mode is not known, or the tags are not a tuple of strings.
    """

    entity: str | None = None
    """User or team that the run belongs to; None for the account's default."""
    name: str | None = None
    """Name of the run; None for the experiment's."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: WandbMode | None = None
    """Where the run is written to: "online", "offline" (files for `wandb sync`) or "disabled" (nowhere). None leaves it
    to the environment variable WANDB_MODE, and is online without it."""

    def __post_init__(self) -> None:
        check_names("tags", self.tags, example="baseline")
        check_choice("mode", self.mode, (*get_args(WandbMode), None))


@parameters
class LoggerParameters:
    """Where numbers go and how often.

    Raises:
        ConfigError: A value cannot work.
    """

    loggers: tuple[LoggerName, ...] = ("console", "jsonl")
    """Loggers to write to: "console" prints lines; the others write in the run directory: "jsonl" metrics.jsonl, "csv"
    metrics.csv, "tensorboard" tensorboard/, "wandb" Weights & Biases, "images" image files in media/."""
    log_every_n_steps: int = 10
    """Optimizer steps between flushes; a flush waits for the device once, so 10 hides it."""
    history_lines: int | None = 10_000
    """Lines that `trainer.history` keeps in memory, the newest; None keeps all. metrics.jsonl has every line."""
    strict: bool = False
    """Whether a logger that fails ends the run. False: it is reported once, and training goes on."""
    wandb: WandbParameters = field(default_factory=WandbParameters)
    """What Weights & Biases shows the run as."""

    def __post_init__(self) -> None:
        check_names("loggers", self.loggers, example="jsonl")
        for name in self.loggers:
            check_choice("loggers", name, get_args(LoggerName))
        if len(set(self.loggers)) != len(self.loggers):
            raise ConfigError(f"loggers={self.loggers} names one logger twice. Name each once.")
        check_integer("log_every_n_steps", self.log_every_n_steps, minimum=1)
        if self.history_lines is not None:
            check_integer("history_lines", self.history_lines, minimum=1, hint=" None keeps all.")
        check_boolean("strict", self.strict)


def check_packages(names: tuple[LoggerName, ...]) -> None:
    """Checks that what the loggers need is installed, without importing it.

    Raises:
        ConfigError: A package is missing; the message names the extra to install.
    """
    for name in names:
        packages, extra = _NEEDS.get(name, ((), ""))
        for package in packages:
            if find_spec(package) is None:
                raise ConfigError(
                    f'loggers={names} names "{name}", whose package {package} is not installed. '
                    f'Install it with pip install "dream-trainer[{extra}]", or leave "{name}" out.'
                )


@dataclass(kw_only=True)
class LoggerConfigMixin:
    """Config of LoggerMixin."""

    logger_parameters: LoggerParameters = field(default_factory=LoggerParameters)
    """Where numbers go and how often."""
