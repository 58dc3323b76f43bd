"""Programs on one rank or several, until each has ended by itself: what they leave is a status and what they wrote.

They are forked from the server of worlds.py, which saves them the imports; with `--all` each is a fresh interpreter.
"""

import atexit
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch.multiprocessing as mp

from tests import worlds
from tests.worlds import free_port, rank_environment


class Ended(NamedTuple):
    """A program that has ended."""

    status: int
    """As `subprocess` gives it: minus the signal's number if one killed it."""
    output: str
    error: str


def run_programs(code: str, world_size: int, cwd: Path, environment: dict[str, str], timeout: float) -> list[Ended]:
    """Runs `code` as each rank's main program, in `cwd`.

    Raises:
        TimeoutError: One did not end; the message has what they wrote.
    """
    port, context = free_port(), mp.get_context(worlds.start_method)
    with tempfile.TemporaryDirectory() as name:
        directories = [Path(name) / str(rank) for rank in range(world_size)]
        processes = []
        for directory in directories:
            directory.mkdir()
        try:
            for rank, directory in enumerate(directories):
                variables = environment | (rank_environment(rank, world_size, port) if world_size > 1 else {})
                process = context.Process(target=_live, args=(code, variables, cwd, directory))
                process.start()
                processes.append(process)
            deadline = time.monotonic() + timeout
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            ended = [Ended(process.exitcode, *_written(to)) for process, to in zip(processes, directories, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    if None in [each.status for each in ended]:
        raise TimeoutError(f"{[each.status for each in ended]} after {timeout} s.\n" + "\n".join(map(str, ended)))
    return ended


def _written(directory: Path) -> list[str]:
    paths = (directory / "output", directory / "error")
    return [path.read_text() if path.exists() else "" for path in paths]


def _live(code: str, environment: dict[str, str], cwd: Path, directory: Path) -> None:
    """What `python -c code` does, to the interpreter's end."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, name in enumerate(("output", "error"), start=1):
        os.dup2(os.open(directory / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    import torch

    torch.set_num_threads(1)
    status: object = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as asked:
        status = asked.code
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace and trace.tb_next)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.exit(status)
