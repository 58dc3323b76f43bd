"""Lines for a person at the screen, with numbers as people read them. A terminal that is gone, or cannot show a name,
never ends a run."""

from __future__ import annotations

import errno
import logging
import math
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


def format_number(value: float) -> str:
    """Four significant digits: `0.1235`, `12.3`, `48,000`, `3.1e-07`, `nan`."""
    if not math.isfinite(value):
        return str(float(value))
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def format_metrics(metrics: dict[str, float]) -> str:
    """`train/loss 1.234 | train/lr 3e-04`."""
    return " | ".join(f"{name} {format_number(value)}" for name, value in metrics.items())


def format_duration(seconds: float) -> str:
    """`0:42`, `12:05`, `3:00:00`, `2d 4:00:00`."""
    total = round(seconds)
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days}d {hours}:{minutes:02}:{left:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def format_count(count: float) -> str:
    """`950`, `12.3 K`, `124 M`, `7.24 B`: how many of something, to three digits."""
    for unit in ("", " K", " M", " B"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:,.3g} T"


def format_bytes(count: float) -> str:
    """`512 B`, `1.50 KiB`, `2.34 GiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.2f} {unit}"
    return f"{count / 1024:.2f} TiB"
