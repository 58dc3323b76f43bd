"""Starting the job's ranks quickly, again and again, and ending them in any way.

A server process imports torch and the framework once and forks a rank in milliseconds; each rank is then as good as one
that was started by itself: a session of its own, its own standard error, torchrun's environment.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.faults.job import Job, main
from tests.faults.namespaces import Hosts, enter
from tests.worlds import SERVER, free_port, rank_environment


def _enter(
    rank: int,
    port: int,
    job: Job,
    attempt: int,
    cwd: Path,
    environment: dict[str, str],
    place: "HostEnvironment | None",
) -> None:
    """A rank's life, in the forked process."""
    os.setsid()
    os.environ.clear()  # the server's is that of the moment when it was started
    os.environ.update(environment)
    os.chdir(cwd)
    with attempt_directory(cwd, attempt).joinpath(f"rank_{rank}.err").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if job.ranks > 1:
        os.environ.update(rank_environment(rank, job.ranks, port))
    if place is not None:
        os.environ.update(place.environment)
        enter(place.namespace)
    main(job, attempt)


@dataclass(frozen=True)
class HostEnvironment:
    """Where a rank is, if its job has several hosts."""

    namespace: Path
    environment: dict[str, str]


def place_on(hosts: Hosts, rank: int, world_size: int, environment: dict[str, str]) -> HostEnvironment:
    """The place of a rank where each host has as many, with what torchrun would set there, and `environment`."""
    local_size = world_size // hosts.count
    host = rank // local_size
    of_torchrun = {
        "MASTER_ADDR": hosts.address(0),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(hosts.count),
    }
    return HostEnvironment(hosts.namespace(host), of_torchrun | environment)


def attempt_directory(directory: Path, attempt: int) -> Path:
    """Where one start of a job keeps what it tells of itself."""
    path = directory / "attempts" / f"{attempt:03d}"
    path.mkdir(parents=True, exist_ok=True)
    return path


class Attempt:
    """One start of a job: its processes and their diaries. As a context it leaves no process behind."""

    def __init__(
        self,
        job: Job,
        directory: Path,
        number: int = 0,
        *,
        hosts: Hosts | None = None,
        environment: Sequence[dict[str, str]] = (),
    ) -> None:
        self.job, self.number = job, number
        self.directory = attempt_directory(directory, number)
        port = free_port()
        places: list[HostEnvironment | None] = [None] * job.ranks
        if hosts is not None:
            of_hosts = environment or [{}] * hosts.count
            places = [
                place_on(hosts, rank, job.ranks, of_hosts[rank * hosts.count // job.ranks]) for rank in range(job.ranks)
            ]
        self.processes: list[ForkServerProcess] = [
            SERVER.Process(target=_enter, args=(rank, port, job, number, directory, dict(os.environ), place))
            for rank, place in enumerate(places)
        ]
        for process in self.processes:
            process.start()
        self.started = time.monotonic()

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # loader's workers too
            process.join()

    # -- what happens to it

    def send(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Sends a signal to some ranks, as far as they still live."""
        for rank in ranks:
            process = self.processes[rank]
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def send_to_groups(self, number: signal.Signals) -> None:
        """Sends a signal to every rank and to the workers of its loaders, as torchrun, SLURM and a terminal do."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, number)

    # -- what it tells

    def ranks_of(self, host: int, hosts: Hosts) -> list[int]:
        """The ranks on a host."""
        size = self.job.ranks // hosts.count
        return list(range(host * size, (host + 1) * size))

    def codes(self) -> list[int | None]:
        """Exit code of each rank; None while it runs, minus the signal's number if one killed it."""
        return [process.exitcode for process in self.processes]

    def is_running(self) -> bool:
        return None in self.codes()

    def wait(self, timeout: float) -> list[int]:
        """Exit codes, once every rank has ended by itself.

        Raises:
            TimeoutError: One did not; the message has what they wrote.
        """
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [code for code in self.codes() if code is not None]
        if len(codes) < len(self.processes):
            raise TimeoutError(f"exit codes {self.codes()} after {timeout} s.\n{self.report()}")
        return codes

    def wait_for(self, line: str, timeout: float = 60.0, ranks: Sequence[int] = (0,)) -> bool:
        """Waits until these ranks have written `line`; False if they ended without.

        Raises:
            TimeoutError: They did neither.
        """
        deadline = time.monotonic() + timeout
        while not all(line in self.lines(rank) for rank in ranks):
            if not self.is_running():
                return all(line in self.lines(rank) for rank in ranks)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {line!r} within {timeout} s.\n{self.report()}")
            time.sleep(0.001)
        return True

    def wait_for_file(self, path: Path, timeout: float = 60.0) -> None:
        """Waits until a file exists.

        Raises:
            TimeoutError: It does not, or the ranks ended without it.
        """
        deadline = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > deadline or not self.is_running():
                raise TimeoutError(f"{path} was never written.\n{self.report()}")
            time.sleep(0.002)

    def lines(self, rank: int) -> list[str]:
        """The rank's diary."""
        path = self.directory / f"rank_{rank}.log"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def numbers(self, word: str, rank: int = 0) -> list[int]:
        """Steps of the diary's lines that begin with `word`."""
        return [int(line.split()[1]) for line in self.lines(rank) if line.split()[0] == word]

    def error(self, rank: int) -> str:
        """What the rank wrote to standard output and error."""
        path = self.directory / f"rank_{rank}.err"
        return path.read_text() if path.exists() else ""

    def report(self) -> str:
        """Everything, for a failure's message."""
        parts = []
        for rank in range(self.job.ranks):
            diary = "; ".join(self.lines(rank)[-12:])
            parts.append(f"--- attempt {self.number} rank {rank}: ... {diary}\n{self.error(rank)[-3000:]}")
        return "\n".join(parts)
