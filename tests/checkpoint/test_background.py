"""A task beside the training thread: its outcome is kept, its error has its own traceback, and none gets lost."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback

import pytest

from tests.api import Background


class Held:
    """A task that runs until it is let go."""

    def __init__(self, outcome: int | BaseException) -> None:
        self.outcome = outcome
        self.started, self.let_go = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> int:
        self.thread = threading.current_thread()
        self.started.set()
        assert self.let_go.wait(30)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def states(background: Background[int]) -> tuple[bool, bool, bool]:
    return background.is_busy, background.has_failed, background.is_collected


def test_a_task_runs_beside_the_caller_and_its_result_is_kept() -> None:
    background: Background[int] = Background("the name")
    held = Held(7)
    assert states(background) == (False, False, True)
    background.start(held)
    assert held.started.wait(30)
    assert states(background) == (True, False, False)
    assert held.thread is not threading.current_thread()
    assert held.thread.name == "the name"
    assert not held.thread.daemon  # the interpreter waits for it
    held.let_go.set()
    held.thread.join()
    assert states(background) == (False, False, False)
    assert background.collect() == 7
    assert states(background) == (False, False, True)
    assert background.collect() is None


def test_collecting_waits_for_the_task() -> None:
    background: Background[int] = Background("name")
    held = Held(3)
    background.start(held)
    threading.Timer(0.2, held.let_go.set).start()
    assert background.collect() == 3


class Odd(BaseException):
    """Not an Exception, as SystemExit is none."""


@pytest.mark.pitfall(31)
@pytest.mark.parametrize("kind", [OSError, Odd, SystemExit])
def test_an_error_is_raised_once_where_it_is_collected_with_the_line_that_raised_it(
    kind: type[BaseException],
) -> None:
    def breaks() -> int:
        raise kind("the cause")

    background: Background[int] = Background("name")
    background.start(breaks)
    while background.is_busy:
        pass
    assert states(background) == (False, True, False)
    with pytest.raises(kind, match="the cause") as info:
        background.collect()
    assert "in breaks" in "".join(traceback.format_exception(info.value))
    assert states(background) == (False, False, True)
    assert background.collect() is None


def test_a_new_task_forgets_nothing_of_the_last_one() -> None:
    background: Background[int] = Background("name")
    held = Held(OSError("lost?"))
    background.start(held)
    with pytest.raises(RuntimeError, match=r"name: a task is running"):
        background.start(lambda: 1)
    held.let_go.set()
    held.thread.join()
    with pytest.raises(RuntimeError, match=r"was not collected"):
        background.start(lambda: 1)
    with pytest.raises(OSError, match=r"lost\?"):
        background.collect()
    background.start(lambda: 1)
    assert background.collect() == 1


@pytest.mark.pitfall(31)
def test_an_interpreter_that_ends_waits_for_the_task() -> None:
    code = (
        "import time\n"
        "from dream_trainer.checkpoint.snapshot_writer import Background\n"
        "Background('name').start(lambda: (time.sleep(0.5), print('done')))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("done\n", 0)
