"""Lines for a person at the screen: a terminal that is gone, or cannot show a name, never ends a run."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

logger = logging.getLogger("dream_trainer")  # of every module
_GONE = (errno.EIO, errno.EPIPE)  # of a terminal, and of a pipe's reader


def show(line: str, file: TextIO | None = None) -> None:
    """Prints a line; characters that the file cannot encode are escaped."""
    file = sys.stdout if file is None else file
    if file is None:  # a process without a console
        return
    try:
        print(line, file=file, flush=True)
    except UnicodeEncodeError:
        encoding = file.encoding or "ascii"
        draw(lambda: print(line.encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True), file)
    except (OSError, ValueError) as error:
        _let_go(file, error)


def draw(act: Callable[[], object], file: TextIO | None = None) -> bool:
    """Calls `act`, which writes to the file; returns whether it took that. None is standard output."""
    try:
        act()
    except (OSError, ValueError) as error:  # a ValueError of a closed file, or of a name that cannot be encoded
        _let_go(sys.stdout if file is None else file, error)
        return False
    return True


def _let_go(file: TextIO, error: Exception) -> None:
    """Discards output to a closed terminal or pipe, now and when Python flushes it at its end."""
    if isinstance(error, OSError) and error.errno in _GONE:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO | None = None) -> None:
    lines = [row for row in [header, *rows] if row]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    show("\n".join([title, *(f"  {line}" for line in text)]), file)


def is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: Jupyter, Colab, or whatever else runs one of IPython's."""
    # Whoever runs in a notebook has IPython loaded; a shell of IPython in a terminal has no kernel.
    ipython: Any = sys.modules.get("IPython")
    if ipython is None:
        return False
    shell = ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
