"""Starts the ranks of checked runs in fresh processes, one per core at a time, and reads their records."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from dream_trainer.testing.program import Program
from dream_trainer.testing.rank_process import Job, read_number, write_job
from dream_trainer.users_code import is_own

COMMAND = (sys.executable, "-c", "from dream_trainer.testing.rank_process import main; main()")


@dataclass
class Run:
    """A run that has ended: each rank's record, or the reason that it has none."""

    job: Job
    seconds: float
    codes: list[int | None]
    records: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    """The error of the first rank that failed by itself."""
    waiting: list[str] = field(default_factory=list)
    """Where each rank was when time ran out."""

    @property
    def is_whole(self) -> bool:
        return len(self.records) == self.job.ranks and self.error is None

    def why(self) -> str:
        """Why there is no record."""
        if self.waiting:
            return "it hangs: " + "; ".join(f"rank {rank} is at {place}" for rank, place in enumerate(self.waiting))
        if self.error is not None:
            place = "" if self.error["place"] is None else f" ({self.error['place']})"
            return f"{self.error['kind']}: {' '.join(self.error['message'].split())}{place}"
        return f"ranks ended with exit codes {self.codes}"


class Launcher:
    """Runs jobs of one program, in a `with`; `tell` is called with a line of progress."""

    def __init__(self, program: Program, tell: Callable[[str], None] = lambda line: None) -> None:
        self.program, self._tell = program, tell
        self.patience = 120.0  # seconds without a finished batch on any rank
        self._cores = max(2, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 2)
        self._free, self._changed, self._is_closing = self._cores, threading.Condition(), False
        self._count = 0

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="dream-trainer-check-"))
        self._pool = ThreadPoolExecutor(32)
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        self._environment = environment | {"PYTHONPATH": path}
        quiet = subprocess.DEVNULL
        self._server = subprocess.Popen(
            [*COMMAND], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=self._environment
        )
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)  # whose runs end their ranks
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def preload(self, modules: Sequence[str]) -> None:
        """Imports installed packages that the program uses once, and not in each run."""
        roots = {name.partition(".")[0] for name in modules}
        installed = {root for root in roots if not root.startswith("_") and _is_installed(root)} | {"dream_trainer"}
        self._order("\t".join(["import", *(name for name in modules if name.partition(".")[0] in installed)]))

    def runs_dir(self) -> str:
        """A new place for runs."""
        self._count += 1
        return str(self.directory / f"runs_{self._count}")

    def start(
        self,
        what: str,
        *,
        killed: Callable[[Callable[[int, int], None], Callable[[int], int]], None] | None = None,
        **values: Any,
    ) -> Future[Run]:
        """Starts a run with these fields of a Job when cores are free."""
        runs_dir = values.pop("runs_dir", None) or self.runs_dir()
        self._count += 1
        directory = self.directory / f"job_{self._count}"
        directory.mkdir()
        job = Job(program=self.program, directory=str(directory), runs_dir=runs_dir, **values)
        return self._pool.submit(self._run, what, job, killed)

    def begin(self, work: Callable[..., list[Run]], *args: Any) -> Future[list[Run]]:
        """Runs work in the background that starts several runs, one after the other."""
        return self._pool.submit(work, *args)

    def _run(self, what: str, job: Job, killed: Any) -> Run:
        need = min(job.ranks, self._cores)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= need or self._is_closing)
            if self._is_closing:
                return Run(job, 0.0, [])
            self._free -= need
        try:
            began = time.monotonic()
            run = self._run_now(job, killed)
            run.seconds = time.monotonic() - began
            self._tell(f"{what}: {run.seconds:.1f} s")
            return run
        finally:
            with self._changed:
                self._free += need
                self._changed.notify_all()

    def _run_now(self, job: Job, killed: Any) -> Run:
        job = replace(job, port=free_port())
        path = write_job(job)
        for rank in range(job.ranks):
            if job.fresh:
                options = {"env": self._environment | job.environment, "start_new_session": True}
                threading.Thread(target=subprocess.run, args=([*COMMAND, path, str(rank)],), kwargs=options).start()
            else:
                self._order(f"{path}\t{rank}")
        progress, deadline = 0, time.monotonic() + self.patience
        if killed is not None:
            threading.Thread(target=killed, args=(partial(_kill, job), partial(_steps_of, job)), daemon=True).start()
        waiting: list[str] = []
        while None in (codes := [read_number(Path(job.directory, f"code_{rank}")) for rank in range(job.ranks)]):
            failed = any(codes)
            deadline = min(deadline, time.monotonic() + 20) if failed else deadline
            if not failed and (now := _progress_of(job)) > progress:
                progress, deadline = now, time.monotonic() + self.patience
            if self._is_closing:
                deadline, failed = 0.0, True
            if time.monotonic() > deadline:
                waiting = waiting or ([] if failed else _where(job))
                for rank in range(job.ranks):
                    _kill(job, rank, signal.SIGKILL)
            time.sleep(0.05)
        run = Run(job, 0.0, codes, waiting=waiting)
        for rank in range(job.ranks):
            found = Path(job.directory) / f"record_{rank}"
            if found.exists():
                run.records.append(pickle.loads(found.read_bytes()))
        errors = [json.loads(file.read_text()) for file in sorted(Path(job.directory).glob("error_*"))]
        own = [error for error in errors if not error["is_consequence"]]
        run.error = next(iter(own or errors), None)
        return run

    def output(self, run: Run) -> str:
        """The terminal output of a run's ranks."""
        return "\n".join(file.read_text(errors="replace") for file in sorted(Path(run.job.directory).glob("output_*")))

    def _order(self, line: str) -> None:
        assert self._server.stdin is not None
        with self._changed:
            self._server.stdin.write(f"{line}\n".encode())
            self._server.stdin.flush()


def _kill(job: Job, rank: int, number: int) -> None:
    directory = Path(job.directory)
    pid = read_number(directory / f"pid_{rank}")
    if pid is not None and not (directory / f"code_{rank}").exists():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _where(job: Job) -> list[str]:
    """The line of the user's code that each rank is in."""
    for rank in range(job.ranks):
        _kill(job, rank, signal.SIGUSR2)
    time.sleep(1.0)
    return [_users_line(Path(job.directory) / f"stacks_{rank}") for rank in range(job.ranks)]


def _steps_of(job: Job, rank: int) -> int:
    """How many steps a rank has done."""
    file = Path(job.directory) / f"steps_{rank}"
    return sum(word.isdigit() for word in file.read_text().split()) if file.exists() else 0


def _progress_of(job: Job) -> int:
    """Grows with each batch of any rank."""
    return sum(file.stat().st_size for file in Path(job.directory).glob("steps_*"))


def _users_line(stacks: Path) -> str:
    for file, number, function in re.findall(r'File "(.+)", line (\d+) in (.+)', stacks.read_text()):
        if is_own(file):
            return f"{Path(file).name}:{number}, in {function}"
    return "the trainer's own code, waiting for other ranks"


def _is_installed(module: str) -> bool:
    with suppress(ImportError, ValueError):
        spec = find_spec(module)
        return spec is not None and "-packages" in str(spec.origin)
    return False


def free_port() -> int:
    """A port of this host that nothing listens on, outside those of outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as held, suppress(OSError):
            held.bind(("127.0.0.1", port))
            return port
