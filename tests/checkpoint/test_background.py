"""A task beside the training thread: its outcome is kept, its error has its own traceback, and none gets lost."""

import subprocess
import sys
import traceback

import pytest

from tests.api import Background


@pytest.mark.pitfall(31)
@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_an_error_is_raised_once_where_it_is_collected_with_the_line_that_raised_it(kind: type[BaseException]) -> None:
    def breaks() -> int:
        raise kind("the cause")

    background: Background[int] = Background("name")
    background.start(breaks)
    while background.is_busy:
        pass
    with pytest.raises(RuntimeError, match="was not collected"):
        background.start(lambda: 1)
    with pytest.raises(kind, match="the cause") as info:
        background.collect()
    assert "in breaks" in "".join(traceback.format_exception(info.value))
    assert background.collect() is None


@pytest.mark.pitfall(31)
def test_an_interpreter_that_ends_waits_for_the_task() -> None:
    code = (
        "import time\n"
        "from dream_trainer.checkpoint.background import Background\n"
        "Background('name').start(lambda: (time.sleep(0.5), print('done')))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("done\n", 0)
