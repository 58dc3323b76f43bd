"""A config that cannot work ends a script in one line and with exit code 2, as a wrong flag does."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

from dream_trainer.errors import ConfigError

PACKAGE = Path(__file__).parent.parent


def end_in_a_line() -> None:
    """From now on, in a script; debuggers and notebooks that show exceptions in a way of their own keep it."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """All but ConfigErrors are shown as ever, with their traceback."""
    if not isinstance(error, ConfigError):
        sys.__excepthook__(kind, error, trace)
        return
    users = [frame for frame in traceback.extract_tb(trace) if not Path(frame.filename).is_relative_to(PACKAGE)]
    place = f" ({users[-1].filename}:{users[-1].lineno}, in {users[-1].name})" if users else ""
    print(f"error: {' '.join(str(error).split())}{place}", file=sys.stderr)
    raise SystemExit(2)
