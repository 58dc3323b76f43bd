"""Forked processes that are sure to start: Python before 3.11.10 may leave one hanging before it runs a line of code
(github.com/python/cpython/issues/112275). So a process says that it runs, and one that does not is forked again."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess

import torch.multiprocessing

from dream_trainer.screen import logger

START_SECONDS = 5.0  # how long a process may take from its fork to its first line: thousands of times what it does take

_IS_NEEDED = sys.version_info < (3, 11, 10)


def sure_to_start(context: BaseContext | None) -> BaseContext | None:
    """`context`, or None for the default one, with processes that are sure to start if it forks them."""
    given = torch.multiprocessing.get_context() if context is None else context
    return _SureContext() if _IS_NEEDED and type(given) is ForkContext else context


class _SureProcess(ForkProcess):
    _pipe: tuple[int, int]

    def run(self) -> None:
        reader, writer = self._pipe
        os.write(writer, b"\0")
        os.close(reader)
        os.close(writer)
        super().run()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        assert isinstance(process_obj, _SureProcess)  # Process.start() hands over itself
        while True:
            process_obj._pipe = reader, writer = os.pipe()
            try:
                child = Popen(process_obj)
                os.close(writer)
                if _says_something(child, reader):
                    return child
            finally:
                os.close(reader)
            logger.warning("process %d hung in its fork (see %s), and another takes its place", child.pid, __name__)


class _SureContext(ForkContext):
    Process = _SureProcess


def _says_something(child: Popen, reader: int) -> bool:
    """Whether a process has begun to run, or has ended; one that has not is killed."""
    said = []
    try:
        said = wait([reader], START_SECONDS)
    finally:
        if not said:
            child.kill()
            child.wait()
            child.close()
    return bool(said)
