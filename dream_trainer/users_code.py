"""Which line of a user's code an error or an operation comes from."""

from __future__ import annotations

import linecache
import os
from types import CodeType, FrameType

import torch

_NOT_USERS = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))
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
