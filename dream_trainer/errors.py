"""The framework's errors for mistakes in a user's code, config, data or checkpoints; which line of a user's code an
error or an operation comes from; and closing, where each owner releases its resources even if another one failed.

Every class also derives from the built-in that fits, so `except ValueError` works where one expects it to."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import CodeType, FrameType


class DreamTrainerError(Exception):
    """Base of every error that Dream Trainer raises on purpose."""


class ConfigError(DreamTrainerError, ValueError):
    """A config field has an invalid value, by itself or on this machine."""


class HookError(DreamTrainerError, TypeError):
    """A hook is missing, or returned something of the wrong kind."""


class RanksDifferError(DreamTrainerError, ValueError):
    """Something is not the same on all ranks that has to be: config, data, optimizers."""


class DataError(DreamTrainerError, ValueError):
    """A data loader is empty, uneven, or cannot be split over ranks."""


class InitError(DreamTrainerError, RuntimeError):
    """A parameter was left uninitialised, or init code did something that a meta build cannot replay."""


class StepError(DreamTrainerError, RuntimeError):
    """`backward` or `step` was called where it would train wrong."""


class NonFiniteError(DreamTrainerError, FloatingPointError):
    """The gradient norm was NaN or infinite, and the policy says to stop."""


class CheckpointError(DreamTrainerError, RuntimeError):
    """A checkpoint is damaged, belongs to another run, or cannot be written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's file is missing, incomplete, changed since it was written, or asks to run code. Resuming "auto"
    passes such a checkpoint over for the next older one; every other CheckpointError ends the run."""


_TORCH = find_spec("torch")  # which the errors of a command must not wait for
_NOT_USERS = tuple(
    os.path.join(os.path.dirname(file), "") for file in (__file__, None if _TORCH is None else _TORCH.origin) if file
)
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")


def is_users(file: str) -> bool:
    """Whether `file` is neither ours, nor PyTorch's, nor Python's own."""
    if file.startswith(("<frozen", *_NOT_USERS)):
        return False
    return "site-packages" in file or "dist-packages" in file or not file.startswith(_STANDARD_LIBRARY)


def is_own(file: str) -> bool:
    """Whether `file` is the user's, and not of an installed package."""
    return is_users(file) and "site-packages" not in file and "dist-packages" not in file


def line_running_in(innermost: FrameType) -> str:
    """The innermost line of a user's in the thread whose innermost frame this is; empty if there is none."""
    frame: FrameType | None = innermost
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else line_of(frame.f_code, frame.f_lineno)


def failing_frame(error: BaseException) -> tuple[FrameType, int] | None:
    """The innermost frame in user code that `error` passed through, and its line; None if there is none."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            found = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    return found


def line_of(code: CodeType, number: int) -> str:
    """File, number and, if it can be read, text of a line."""
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number}" + (f" `{text}`" if text else "")


@contextmanager
def followed_by(finish: Callable[[], object]) -> Iterator[None]:
    """Calls `finish` at the end of the block; after an exception of the block, one of `finish` becomes a note of it."""
    try:
        yield
    except BaseException as first:
        try:
            finish()
        except Exception as later:
            first.add_note(f"Closing continued after this, and failed again: {in_a_line(later)}")
        raise
    finish()


def call_each(actions: Sequence[Callable[[], object]]) -> None:
    """Calls every one, although others raise; then the first exception is raised, with the later ones as its notes."""
    with ExitStack() as stack:
        for action in reversed(actions):
            stack.enter_context(followed_by(action))


def in_a_line(error: BaseException) -> str:
    """The class of an exception and the first line of its message."""
    return f"{type(error).__name__}: {error}".split("\n")[0]
