"""One task at a time beside the training thread, whose outcome is kept until somebody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs a task in a thread that ends with the task. The interpreter waits for it before it exits.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a task is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the last task has ended with an exception that nobody has collected."""
        return not self.is_busy and self._error is not None

    @property
    def is_collected(self) -> bool:
        """Whether there is neither a task nor an outcome."""
        return self._thread is None

    def start(self, task: Callable[[], T]) -> None:
        """Starts `task`. The last one's outcome must have been collected."""
        if self._thread is not None:
            raise RuntimeError(f"{self._name}: a task is running, or its outcome was not collected.")
        self._thread = threading.Thread(target=self._run, args=(task,), name=self._name)
        self._thread.start()

    def collect(self) -> T | None:
        """Waits for the task and returns what it returned; None if there is none.

        Raises:
            BaseException: What the task raised, with its own traceback.
        """
        if self._thread is None:
            return None
        self._thread.join()
        result, error = self._result, self._error
        self._thread = self._result = self._error = None
        if error is not None:
            raise error
        return result

    def _run(self, task: Callable[[], T]) -> None:
        try:
            self._result = task()
        except BaseException as error:
            self._error = error
