"""LoggerGroup: the loggers of rank 0 as one; each fails for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dream_trainer.checks import refuse
from dream_trainer.config.logger_parameters import LoggerParameters, logger_entry
from dream_trainer.errors import ConfigError, HookError
from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.media import Media

_FAILED = object()


# Names for pip of modules that are called otherwise.
_DISTRIBUTIONS = {"PIL": "pillow", "google_crc32c": "google-crc32c", "mlflow": "mlflow-skinny"}


class LoggerGroup:
    """Several loggers, opened when there is something to write."""

    def __init__(self, loggers: list[Logger], report: Callable[[str, str], None], *, strict: bool = False) -> None:
        self._loggers = _checked(loggers)
        self._report = report
        self._strict = strict
        self._open: list[Logger] = []
        self._wait()

    def _wait(self) -> None:
        self.is_open = False
        self.waits_early = any(logger.is_open_early for logger in self._loggers)

    def open(
        self, run_dir: Path, config: Callable[[], dict[str, Any]], resumed_step: int | None, *, early: bool = False
    ) -> None:
        """Opens every logger, or with `early` those that the user's code may write to by itself."""
        waiting = [logger for logger in self._loggers if logger.is_open_early] if self.waits_early else []
        self.waits_early = False
        if not early:
            self.is_open = True
            waiting += [logger for logger in self._loggers if not logger.is_open_early]
        plain = config() if waiting else {}
        for logger in waiting:
            if self._guarded(logger, partial(logger.open, run_dir, plain, resumed_step)) is not _FAILED:
                self._open.append(logger)

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        for logger in self._open:
            self._guarded(logger, partial(logger.log, metrics, stamp))

    def log_media(self, name: str, media: Media, stamp: Stamp) -> None:
        shown = [self._guarded(logger, partial(logger.log_media, name, media, stamp)) for logger in self._open]
        if all(answer is False for answer in shown):
            kind = type(media).__name__
            self._report(
                f"media {kind}",
                f'{name!r} is written nowhere: no logger takes what is {kind}. Add "tensorboard" or "wandb" to '
                'loggers, "jsonl" for text, tables and histograms, or "images" for images and videos.',
            )

    def close(self) -> None:
        loggers, self._open = self._open, []
        self._wait()
        with ExitStack() as stack:
            for logger in reversed(loggers):
                stack.callback(self._guarded, logger, logger.close)

    def state_dict(self) -> dict[str, Any]:
        """The loggers' state for a checkpoint, by class and number within the class."""
        states = {key: self._guarded(logger, logger.state_dict) for key, logger in self._numbered()}
        return {key: state for key, state in states.items() if state and state is not _FAILED}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for key, logger in self._numbered():
            if key in states:
                self._guarded(logger, partial(logger.load_state_dict, states[key]))

    def _numbered(self) -> Iterator[tuple[str, Logger]]:
        counts: Counter[str] = Counter()
        for logger in self._loggers:
            name = type(logger).__name__
            yield f"{name}.{counts[name]}", logger
            counts[name] += 1

    def _guarded(self, logger: Logger, act: Callable[[], object]) -> object:
        try:
            return act()
        except Exception as exc:
            if self._strict:
                raise
            self._report(
                f"logger {id(logger)}",
                f"{type(logger).__name__} failed and may miss lines; training continues. {type(exc).__name__}: {exc}",
            )
            return _FAILED


def check_loggers(parameters: LoggerParameters) -> list[type[Logger]]:
    """The classes of `parameters.loggers`, in their order, if they can work."""
    classes = [_logger_class(name) for name in parameters.loggers]
    for name, cls in zip(parameters.loggers, classes, strict=True):
        missing = [_DISTRIBUTIONS.get(module, module) for module in cls.requires if find_spec(module) is None]
        refuse(
            bool(missing),
            f'loggers={parameters.loggers} names "{name}", whose package {", ".join(missing)} is not installed. '
            f'Run pip install {" ".join(missing)}, or leave "{name}" out.',
        )
        cls.check(parameters)
    return classes


def _logger_class(name: str) -> type[Logger]:
    entry = logger_entry(name)
    try:
        cls = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'the logger "{name}" is {entry.value}, which cannot be loaded ({error}). Install what it needs, or leave '
            f'"{name}" out.'
        ) from error
    if isinstance(cls, type) and issubclass(cls, Logger):
        return cls
    raise ConfigError(f'the logger "{name}" is {entry.value}, which is no class of loggers. Derive it from Logger.')


def _checked(returned: object) -> list[Logger]:
    if not isinstance(returned, list | tuple):
        what = f"a {type(returned).__name__}" if isinstance(returned, Logger) else repr(returned)
        raise HookError(f"configure_loggers returned {what}, not a list. Return a list of loggers, [] for none.")
    for logger in returned:
        if isinstance(logger, type):
            name = logger.__name__
            raise HookError(f"configure_loggers returned {name} in its list, a class. Write {name}() there.")
        if not isinstance(logger, Logger):
            raise HookError(
                f"configure_loggers returned {logger!r} in its list, which is not a logger. Derive its class from "
                "dream_trainer.loggers.Logger."
            )
    return list(returned)
