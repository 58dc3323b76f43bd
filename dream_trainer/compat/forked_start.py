"""Forked processes that are sure to start: Python before 3.11.10 may leave one hanging before it runs a line of code
(github.com/python/cpython/issues/112275). So a process says that it runs, and one that does not is forked again."""

from __future__ import annotations

import sys
from multiprocessing import Pipe
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing

from dream_trainer.screen import logger

START_SECONDS = 5.0  # how long a process may take from its fork to its first line: thousands of times what it does take

_IS_NEEDED = sys.version_info < (3, 11, 10)


def sure_to_start(context: BaseContext | None) -> BaseContext | None:
    """`context`, or None for the default one, with processes that are sure to start if it forks them."""
    given = torch.multiprocessing.get_context() if context is None else context
    return _SureContext() if _IS_NEEDED and type(given) is ForkContext else context


class _SureProcess(ForkProcess):
    _said: Any  # an end of a pipe

    def run(self) -> None:
        self._said.send_bytes(b"\0")
        self._said.close()
        super().run()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        assert isinstance(process_obj, _SureProcess)  # Process.start() hands over itself
        while True:
            reader, process_obj._said = Pipe(duplex=False)
            child, has_begun = Popen(process_obj), False
            try:
                process_obj._said.close()
                has_begun = reader.poll(START_SECONDS)  # true of one that has ended, too
            finally:
                reader.close()
                if not has_begun:
                    child.kill()
                    child.wait()
                    child.close()
            if has_begun:
                return child
            logger.warning("process %d hung in its fork (see %s), and another takes its place", child.pid, __name__)


class _SureContext(ForkContext):
    Process = _SureProcess
