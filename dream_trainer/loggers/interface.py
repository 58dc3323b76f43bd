"""Logger: a destination of numbers and other logged values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

if TYPE_CHECKING:
    from dream_trainer.config.logger_parameters import LoggerParameters
    from dream_trainer.loggers.media import Media

T = TypeVar("T")


class Stamp(NamedTuple):
    """The place of a set of metrics in a run."""

    step: int  # optimizer steps completed; the one axis of both training and validation
    epoch: int  # epochs completed, which is the 0-based number of the running one
    samples: int  # samples consumed by all ranks
    time: float  # wall-clock time in seconds since 1970


class Logger(ABC):
    """A place that numbers are written to. It lives on rank 0 only, and its methods may not run collectives.

    An exception from any of them is reported once and does not stop training, unless `strict=True`.

    Attributes:
        requires: Packages that it imports when it opens; a missing one is an error when the trainer is built.
    """

    requires: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def configured(cls, parameters: LoggerParameters) -> Self:
        """The logger that `logger_parameters.loggers` names. Default: made without arguments."""
        return cls()

    @classmethod  # noqa: B027 (most loggers have no parameters)
    def check(cls, parameters: LoggerParameters) -> None:
        """Raises ConfigError if it does not support these parameters; called when the trainer is built."""

    @abstractmethod
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        """Called once when training begins, and again after a checkpoint was loaded in the middle of a run.

        `run_dir` may not exist yet. Records of steps after `resumed_step` will come again, so drop them; it is None
        for a new run.
        """

    @abstractmethod
    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Writes `metrics`, means (or the requested reductions) over all values since the last call."""

    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        """Writes an image, video, sound, table, histogram or text, one of the classes in `dream_trainer.loggers.media`.

        Returns whether this logger shows that kind. Default: none.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """This logger's state for checkpoints, even before `open`: numbers, strings, containers of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most loggers keep nothing)
        """Restores the result of `state_dict`, before `open`. Another run's checkpoint gives nothing."""

    def close(self) -> None:  # noqa: B027 (most loggers have nothing to release)
        """Releases resources of `open`. Default: nothing."""

    def _opened(self, what: T | None) -> T:
        if what is None:
            raise RuntimeError("log() was called before open(). Open the logger on a run directory first.")
        return what
