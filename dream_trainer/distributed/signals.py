"""Signals ask; they never act. The handler sets a flag that the pulse carries to all ranks, which stop at one step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Signals:
    """SIGTERM and SIGINT received by this process. The pulse tells the other ranks.

    Args:
        another_rank_failed: Whether the job is lost already. torchrun then sends SIGTERM to the others, which must not
            wait for a step that will never end.

    Attributes:
        terminated: SIGTERM came.
        interrupted: SIGINT came.
    """

    def __init__(self, another_rank_failed: Callable[[], bool] = lambda: False) -> None:
        self._another_rank_failed = another_rank_failed
        self.terminated = False
        self.interrupted = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles both signals inside. Outside the main thread Python allows no handlers, and there are none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            if self._another_rank_failed():
                os._exit(1)
            self.terminated = True
            return
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        sys.stderr.write("\nstopping after this step; press Ctrl-C again to stop at once\n")


def exit_code(number: signal.Signals) -> int:
    """128 + the signal's number, as shells and schedulers expect; 0 under torchrun, which sets its own code."""
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 128 + number
