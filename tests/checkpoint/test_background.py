"""A task beside the training thread, which none that ends leaves unfinished."""

import subprocess
import sys

import pytest


@pytest.mark.pitfall(31)
def test_an_interpreter_that_ends_waits_for_the_task() -> None:
    code = (
        "import time\n"
        "from dream_trainer.checkpoint.saver import Background\n"
        "Background('name').start(lambda: (time.sleep(0.5), print('done')))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("done\n", 0)
