"""The faults of `tools/hosts.sh`: what befalls a host of a job under torchrun, and what becomes of the job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults.job import Job
from tests.faults.namespaces import Hosts, can_make_hosts
from tests.faults.small_disk import SmallDisk
from tests.trainer.small import ROOT
from tools import elastic

RANKS, N_HOSTS = 4, 2
DEVICES = {"step_timeout_seconds": 120.0, "start_timeout_seconds": 120.0}
BY_DEFAULT = {"dp_replicate": N_HOSTS, "dp_shard": RANKS // N_HOSTS}
MESHES: dict[str, dict[str, Any]] = {
    "shards inside of hosts, replicas between": {"devices": BY_DEFAULT},
    "sharded over all ranks": {"devices": {"dp_replicate": 1, "dp_shard": 4}},
    "replicated on all ranks": {"devices": {"dp_replicate": 4, "dp_shard": 1}},
    "hosts that train on their own (DiLoCo)": {
        "devices": BY_DEFAULT,
        "local_sgd": {"every_n_steps": 8, "outer": "sgd", "workers": N_HOSTS},
    },
}


class Start:
    """One start of the job: a torchrun on each host. As a context it leaves no process behind.

    Args:
        hosts: Where.
        job: What.
        directories: Working directory of each host.
        environment: Further variables of each host.
    """

    def __init__(
        self, hosts: Hosts, job: Job, directories: Sequence[Path], environment: Sequence[dict[str, str]] = ({}, {})
    ) -> None:
        self.hosts, self.directory = hosts, directories[0]
        self.logs = [directory / f"host_{host}.log" for host, directory in enumerate(directories)]
        self.agents = [
            self._agent(host, job, directory, environment[host]) for host, directory in enumerate(directories)
        ]

    def _agent(self, host: int, job: Job, directory: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = ["ip", "netns", "exec", self.hosts.namespace(host).name]
        command += [sys.executable, "-m", "torch.distributed.run", f"--nnodes={N_HOSTS}", f"--node-rank={host}"]
        command += [f"--nproc-per-node={RANKS // N_HOSTS}", f"--master-addr={self.hosts.address(0)}"]
        command += ["--master-port=29511", "--monitor-interval=0.1", "-m", "tests.faults.job", job.to_json()]
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
        with self.logs[host].open("a") as log:
            return subprocess.Popen(command, cwd=directory, env=variables, stdout=log, stderr=log)

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *exc: object) -> None:
        for host in range(N_HOSTS):
            self.kill(host)
        for agent in self.agents:
            agent.wait()

    def kill(self, host: int) -> None:
        """Ends every process of a host."""
        self.send(host, signal.SIGKILL)

    def send(self, host: int, number: signal.Signals, at_most: int | None = None) -> None:
        """Sends a signal to the processes of a host, or to the first ranks among them."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.hosts.namespace(host).name], capture_output=True, text=True, check=False
        )
        found = sorted(map(int, listed.stdout.split()))
        if at_most is not None:
            found = [number for number in found if b"tests.faults.job" in _command(number) and _is_rank(number)]
        for process in found[:at_most]:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def wait_for(self, line: str) -> None:
        diary = self.directory / "attempts/000/rank_0.log"
        deadline = time.monotonic() + 120
        while not diary.exists() or line not in diary.read_text().splitlines():
            if time.monotonic() > deadline or any(agent.poll() is not None for agent in self.agents):
                raise TimeoutError(f"no {line!r}:\n{self.said()[-4000:]}")
            time.sleep(0.02)

    def notices(self) -> float | None:
        """The moment when a rank says that the job ends; None if all hosts end without."""
        while "the job ends" not in self.said() and "Error: " not in self.said():
            if all(agent.poll() is not None for agent in self.agents):
                return None
            time.sleep(0.05)
        return time.monotonic()

    def said(self) -> str:
        return "".join(log.read_text() for log in self.logs)


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_rank(process: int) -> bool:
    return b"torch.distributed.run" not in _command(process)


def silence(start: Start) -> None:
    start.hosts.silence(1)


def silence_and_hear(start: Start) -> None:
    start.hosts.silence(1)
    time.sleep(5.0)
    start.hosts.hear(1)


def cut_power(start: Start, host: int = 1) -> None:
    start.hosts.cut(host)  # first, so that no connection of its processes is closed to the others
    start.kill(host)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What befalls the job, and what is to become of it."""

    says: str = ""
    """In the output of the hosts that are left."""
    befalls: Callable[[Start], None] | None = None
    """None: something was wrong from the start."""
    ends: bool = True
    """Whether the job ends by it."""
    environment: tuple[dict[str, str], dict[str, str]] = ({}, {})
    own_directories: bool = False
    fills: bool = False
    """Whether the disk of the checkpoints is full when the first rank of host 1 writes the third of them."""


FAULTS = {
    "a host's processes are killed": Fault(befalls=lambda start: start.kill(1), says="["),
    "a host loses power": Fault(befalls=cut_power, says="host 1 ("),
    "the host with the store loses power": Fault(befalls=lambda start: cut_power(start, 0), says="the job's store at"),
    "a link falls silent": Fault(befalls=silence, says="has not been heard of for"),
    "a link is silent for 5 s": Fault(befalls=silence_and_hear, ends=False),
    "all processes of a host are stopped": Fault(
        befalls=lambda start: start.send(1, signal.SIGSTOP), says="has not been heard of for"
    ),
    "one process is stopped": Fault(
        befalls=lambda start: start.send(1, signal.SIGSTOP, at_most=1), says="has been stopped for"
    ),
    "the wrong interface is named": Fault(
        environment=({}, {"GLOO_SOCKET_IFNAME": "lo"}), says="GLOO_SOCKET_IFNAME=lo: only this host is reached by it"
    ),
    "the disk is full when host 1 writes": Fault(
        befalls=lambda start: None, fills=True, says="No space left on device"
    ),
    "the run directory is not shared": Fault(own_directories=True, says="is not the directory that rank 0 sees"),
}


@dataclass
class Outcome:
    """What became of the job."""

    noticed: float | None
    """Seconds from the fault, or from the start where there was none, until the job said something of it."""
    ended: float
    """Seconds until torchrun had ended on every host that was left."""
    problems: list[str] = field(default_factory=list)


def run(hosts: Hosts, fault: Fault, directory: Path, truth: dict[str, Any]) -> Outcome:
    """Lets the fault come, and starts the job again."""
    job = job_of(step_seconds=0.2)
    directories = [directory, directory]
    if fault.own_directories:
        directories = [directory / "0", directory / "1"]
        for own in directories:
            own.mkdir()
    if fault.fills:
        with SmallDisk(directory) as disk:
            broken = replace(job, fault=disk.filled_by(rank=RANKS // N_HOSTS))
            return _run(hosts, fault, job, broken, directories, truth, between=disk.empty)
    return _run(hosts, fault, job, job, directories, truth)


def _run(
    hosts: Hosts,
    fault: Fault,
    job: Job,
    broken: Job,
    directories: Sequence[Path],
    truth: dict[str, Any],
    between: Callable[[], None] = lambda: None,
) -> Outcome:
    """Starts the `broken` job, and after what `between` mends, the sound one in the first host's directory."""
    began = time.monotonic()
    with Start(hosts, broken, directories, fault.environment) as start:
        if fault.befalls is not None:
            start.wait_for("saved 4")
            began = time.monotonic()
            fault.befalls(start)
        left = [0, 1] if fault.befalls is None or not fault.ends else survivors(start)
        noticed = start.notices() if fault.ends else None
        codes = [start.agents[host].wait(120) for host in left]
        outcome = Outcome(noticed and noticed - began, time.monotonic() - began)
        for host in range(N_HOSTS):
            start.hosts.restore(host)
        wanted = 1 if fault.ends else 0
        outcome.problems += [f"exit codes {codes}"] * (set(codes) != {wanted})
        outcome.problems += [f"does not say {fault.says!r}"] * (fault.says not in start.said())
    between()
    if fault.ends:
        with Start(hosts, job, [directories[0]] * N_HOSTS) as again:
            codes = [agent.wait(120) for agent in again.agents]
            outcome.problems += [f"started again: exit codes {codes}"] * (codes != [0, 0])
    end = directories[0] / "outcome.json"
    ended = json.loads(end.read_text()) if end.exists() else None
    outcome.problems += ["ends otherwise than the undisturbed run"] * (ended != truth)
    return outcome


def survivors(start: Start) -> list[int]:
    """The hosts whose torchrun can still end by itself."""
    time.sleep(0.5)
    return [host for host, agent in enumerate(start.agents) if agent.poll() is None and not _is_stopped(start, host)]


def _is_stopped(start: Start, host: int) -> bool:
    return Path(f"/proc/{start.agents[host].pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def job_of(devices: Mapping[str, Any] | None = None, **options: Any) -> Job:
    return Job(ranks=RANKS, devices=DEVICES | dict(devices or {}), **options)


def undisturbed(directory: Path, job: Job) -> dict[str, Any]:
    """A job on one host."""
    directory.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "tests.faults.job", job.to_json()]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=directory, env=variables, check=True, capture_output=True)
    found: dict[str, Any] = json.loads((directory / "outcome.json").read_text())
    return found


def main(names: Sequence[str]) -> int:
    """Prints a line for each mesh and each fault; the number that went wrong."""
    if not can_make_hosts():
        print("tools/hosts.sh makes network namespaces, which takes root and iproute2 (Linux). Nothing was run.")
        return 0
    if names[:1] == ["--elastic"]:
        return elastic.main(int(names[1]) if names[1:] else 100, int(names[2]) if names[2:] else 0)
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        print(f"no fault {unknown[0]!r}; there are: {'; '.join(FAULTS)}", file=sys.stderr)
        return 2
    failed = 0
    root = Path(tempfile.mkdtemp(prefix="hosts-"))
    print(f"{'2 hosts x 2 ranks':<44}{'noticed':>8}{'ended':>8}", flush=True)
    truth = undisturbed(root / "truth", job_of(devices=BY_DEFAULT))
    with Hosts(N_HOSTS) as hosts:
        for number, (mesh, options) in enumerate(MESHES.items() if not names else ()):
            directory, job = root / f"mesh-{number}", job_of(**options)
            expected = undisturbed(root / f"mesh-{number}-one-host", job)
            directory.mkdir()
            began = time.monotonic()
            with Start(hosts, job, [directory] * 2) as start:
                codes = [agent.wait(120) for agent in start.agents]
            found = json.loads((directory / "outcome.json").read_text()) if codes == [0, 0] else None
            problems = [] if found == expected else [f"differs from one host's (exit codes {codes})"]
            failed += tell(mesh, Outcome(None, time.monotonic() - began, problems))
        for number, name in enumerate(names or FAULTS):
            directory = root / f"fault-{number}"
            directory.mkdir()
            outcome = run(hosts, FAULTS[name], directory, truth)
            failed += tell(name, outcome)
    if failed:
        print(f"what was left is in {root}", file=sys.stderr)
    else:
        shutil.rmtree(root)
    return failed


def tell(name: str, outcome: Outcome) -> bool:
    noticed = "" if outcome.noticed is None else f"{outcome.noticed:.1f} s"
    print(f"{name:<44}{noticed:>8}{outcome.ended:>6.1f} s  {'; '.join(outcome.problems) or 'as it should'}", flush=True)
    return bool(outcome.problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
