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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

from dream_trainer.testing.program import Program
from dream_trainer.testing.rank_process import Job
from dream_trainer.users_code import is_own

COMMAND = (sys.executable, "-c", "from dream_trainer.testing.rank_process import main; main()")


@dataclass
class Run:
    """A run that has ended: each rank's record, or the reason that it has none."""

    job: Job
    seconds: float = 0.0
    codes: Sequence[int | None] = ()
    records: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None  # of the first rank that failed by itself
    waiting: list[str] = field(default_factory=list)  # where each rank was when time ran out

    @property
    def is_whole(self) -> bool:
        return len(self.records) == self.job.ranks and self.error is None

    def why(self) -> str:
        """Why there is no record."""
        if self.waiting:
            return "it hangs: " + "; ".join(f"rank {rank} is at {place}" for rank, place in enumerate(self.waiting))
        if self.error is not None:
            return str(self.error["text"])
        return f"ranks ended with exit codes {self.codes}"

    def output(self) -> str:
        """The terminal output of its ranks."""
        return "\n".join(file.read_text(errors="replace") for file in sorted(Path(self.job.directory).glob("output_*")))


class Launcher:
    """Runs jobs of one program, in a `with`; `tell` is called with a line of progress."""

    def __init__(self, program: Program, tell: Callable[[str], None] = lambda line: None) -> None:
        self.program, self._tell = program, tell
        self.patience = 120.0  # seconds without a finished batch on any rank
        self._cores = max(2, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 2)
        self._free, self._closing, self._number = threading.Semaphore(self._cores), threading.Event(), count()
        self._turn, self._line = threading.Lock(), threading.Lock()

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="dream-trainer-check-"))
        self._pool = ThreadPoolExecutor(32)
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        self._environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        quiet = subprocess.DEVNULL
        self._server = subprocess.Popen(
            [*COMMAND], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=self._environment
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)  # whose runs end their ranks
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def preload(self, modules: Sequence[str]) -> None:
        """Imports modules once, and not in each run."""
        self._order("import", *modules)

    def start(self, what: str, *jobs: Mapping[str, Any]) -> Future[list[Run]]:
        """Starts runs when cores are free, each with these fields of a Job; one after the other continues the last."""
        return self._pool.submit(self._run_all, what, jobs)

    def _run_all(self, what: str, jobs: Sequence[Mapping[str, Any]]) -> list[Run]:
        runs: list[Run] = []
        runs_dir = str(self.directory / f"runs_{next(self._number)}")
        for values in jobs:
            directory = self.directory / f"job_{next(self._number)}"
            directory.mkdir()
            job = Job(program=self.program, directory=str(directory), runs_dir=runs_dir, port=free_port(), **values)
            need = min(job.ranks, self._cores)
            with self._turn:  # one after the other, so that none keeps a part of what it needs
                for _ in range(need):
                    self._free.acquire()
            try:
                began = time.monotonic()
                runs.append(Run(job) if self._closing.is_set() else self._run(job))
                runs[-1].seconds = time.monotonic() - began
                self._tell(f"{what}: {runs[-1].seconds:.1f} s")
            finally:
                self._free.release(need)
            if not runs[-1].is_whole and job.killed is None:
                break
        return runs

    def _run(self, job: Job) -> Run:
        directory, ranks = Path(job.directory), range(job.ranks)
        path = directory / "job"
        path.write_bytes(pickle.dumps((sys.path, os.getcwd(), job)))
        for rank in ranks:
            if job.hash_seed:
                options = {"env": self._environment | {"PYTHONHASHSEED": job.hash_seed}, "start_new_session": True}
                words = [*COMMAND, str(path), str(rank)]
                threading.Thread(target=subprocess.run, args=(words,), kwargs=options).start()
            else:
                self._order(str(path), str(rank))
        progress, killed, began = 0, job.killed, time.monotonic()
        deadline = began + self.patience
        run = Run(job)
        while None in (codes := [_read(directory / f"code_{rank}") for rank in ranks]):
            failed = any(codes)
            now = sum(file.stat().st_size for file in directory.glob("steps_*"))  # grows with each batch of any rank
            deadline = min(deadline, time.monotonic() + 20) if failed else deadline
            if not failed and now > progress:
                progress, deadline = now, time.monotonic() + self.patience
            if killed is not None and (done := _steps_of(directory / f"steps_{killed[0]}")) >= killed[1]:
                time.sleep(random.random() * (time.monotonic() - began) / (done + 5))
                _kill(directory, killed[0], killed[2])
                killed = None
            if time.monotonic() > deadline or self._closing.is_set():
                run.waiting = run.waiting or ([] if failed or self._closing.is_set() else _where(directory, ranks))
                for rank in ranks:
                    _kill(directory, rank, signal.SIGKILL)
            time.sleep(0.05 if killed is None else 0.01)
        run.codes = codes
        found = (_read(directory / f"record_{rank}") for rank in ranks)
        run.records = [record for record in found if record is not None]
        errors = [json.loads(file.read_text()) for file in sorted(directory.glob("error_*"))]
        own = [error for error in errors if not error["is_consequence"]]
        run.error = next(iter(own or errors), None)
        return run

    def _order(self, *words: str) -> None:
        assert self._server.stdin is not None
        with self._line:
            self._server.stdin.write("\t".join(words).encode() + b"\n")
            self._server.stdin.flush()


def _read(file: Path) -> Any:
    return pickle.loads(file.read_bytes()) if file.exists() else None


def _kill(directory: Path, rank: int, number: int) -> None:
    pid = _read(directory / f"pid_{rank}")
    if pid is not None and not (directory / f"code_{rank}").exists():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _where(directory: Path, ranks: Sequence[int]) -> list[str]:
    """The line of the user's code that each rank is in."""
    for rank in ranks:
        _kill(directory, rank, signal.SIGUSR2)
    time.sleep(1.0)
    return [_users_line(directory / f"stacks_{rank}") for rank in ranks]


def _steps_of(file: Path) -> int:
    """How many steps a rank has done."""
    return sum(word.isdigit() for word in file.read_text().split()) if file.exists() else 0


def _users_line(stacks: Path) -> str:
    for file, number, function in re.findall(r'File "(.+)", line (\d+) in (.+)', stacks.read_text()):
        if is_own(file):
            return f"{Path(file).name}:{number}, in {function}"
    return "the trainer's own code, waiting for other ranks"


def free_port() -> int:
    """A port of this host that nothing listens on, outside those of outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as held, suppress(OSError):
            held.bind(("127.0.0.1", port))
            return port
