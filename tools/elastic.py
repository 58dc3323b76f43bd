"""Hosts that come and go at random under an elastic torchrun: `tools/hosts.sh --elastic ROUNDS [SEED]`."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.faults.elastic_job import GLOBAL_BATCH
from tests.faults.namespaces import Hosts
from tests.trainer.small import ROOT

N_HOSTS = 3
FOREVER = 1_000_000
SECONDS_OF_A_ROUND = 180.0
SECONDS_TO_STOP = 60.0
STEPS_OF_A_ROUND = 6


class Fleet:
    """The torchruns of a job, one on each host that is up. Host 0, which has the store, stays up; a torchrun that ends
    is started again, as a cluster would. As a context it leaves no process behind.

    Args:
        hosts: Where.
        directory: Working directory of all.
        n_steps: Length of the job.
    """

    def __init__(self, hosts: Hosts, directory: Path, n_steps: int) -> None:
        self._hosts, self._directory, self._n_steps = hosts, directory, n_steps
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self.restarted = 0

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        for host in list(self._agents):
            self.lose(host, cut=False)

    @property
    def up(self) -> list[int]:
        return sorted(self._agents)

    def start(self, host: int) -> None:
        """A host comes."""
        rendezvous = f"last_call_timeout=2,join_timeout=120,is_host={int(host == 0)}"
        command = ["ip", "netns", "exec", self._hosts.namespace(host).name]
        command += [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{N_HOSTS}", "--nproc-per-node=1"]
        command += ["--max-restarts=1000", "--rdzv-backend=c10d", f"--rdzv-endpoint={self._hosts.address(0)}:29533"]
        command += ["--rdzv-id=elastic", f"--rdzv-conf={rendezvous}", f"--local-addr={self._hosts.address(host)}"]
        command += ["--monitor-interval=0.2", "-m", "tests.faults.elastic_job", str(self._n_steps)]
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else PyTorch 2.13 never takes a later host in
        with (self._directory / f"host_{host}.log").open("a") as log:
            self._agents[host] = subprocess.Popen(command, cwd=self._directory, env=variables, stdout=log, stderr=log)

    def stop(self, host: int) -> None:
        """A host is told to go: its torchrun gets SIGTERM, all ranks save, and the others go on."""
        self._agents[host].terminate()
        try:
            self._agents[host].wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            print(f"      host {host} has not ended within {SECONDS_TO_STOP:.0f} s", flush=True)
        self.lose(host, cut=False)

    def lose(self, host: int, *, cut: bool) -> None:
        """A host goes: its processes are killed, before that its wire is pulled if it loses its power."""
        if cut:
            self._hosts.cut(host)
        listed = subprocess.run(
            ["ip", "netns", "pids", self._hosts.namespace(host).name], capture_output=True, text=True, check=False
        )
        for process in map(int, listed.stdout.split()):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._agents.pop(host).wait()
        self._hosts.restore(host)

    def end_of_a_round(self, n_ranks: int, n_steps: int) -> bool:
        """Waits until so many ranks have trained so many steps together; False if they do not in time."""
        deadline = time.monotonic() + SECONDS_OF_A_ROUND
        while time.monotonic() < deadline:
            for host, agent in list(self._agents.items()):
                if agent.poll() is not None:
                    self.restarted += 1
                    self.start(host)
            newest = rounds(self._directory / "samples_0.jsonl")
            if newest and newest[-1][2] == n_ranks and sum(line[0] == newest[-1][0] for line in newest) >= n_steps:
                return True
            time.sleep(0.2)
        return False


def rounds(path: Path) -> list[tuple[float, int, int, list[int]]]:
    """What a rank has written: round, step, number of ranks, samples; a line may be cut short by a kill."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(tuple(json.loads(line)))
        except json.JSONDecodeError:
            continue
    return found


def samples_of_steps(directory: Path) -> dict[int, list[list[int]]]:
    """For each step the samples of each time that it was trained whole, in order of their numbers."""
    by_time: dict[tuple[int, float], list[int]] = defaultdict(list)
    for path in directory.glob("samples_*.jsonl"):
        for began, step, _, samples in rounds(path):
            by_time[step, began] += samples
    found: dict[int, list[list[int]]] = defaultdict(list)
    for (step, _), samples in sorted(by_time.items()):
        if len(samples) == GLOBAL_BATCH:
            found[step].append(sorted(samples))
    return found


def undisturbed(directory: Path, n_steps: int) -> dict[int, list[list[int]]]:
    """The samples of each step in one process."""
    directory.mkdir()
    command = [sys.executable, "-m", "tests.faults.elastic_job", str(n_steps)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=directory, env=variables, check=True, capture_output=True)
    return samples_of_steps(directory)


def main(n_rounds: int, seed: int) -> int:
    """Prints a line for each round and a summary; the number of what went wrong."""
    rng, root = random.Random(seed), Path(tempfile.mkdtemp(prefix="elastic-"))
    directory = root / "run"
    directory.mkdir()
    failed, worst = 0, 0.0
    with Hosts(N_HOSTS) as hosts, Fleet(hosts, directory, FOREVER) as fleet:
        for host in (0, 1):
            fleet.start(host)
        print(f"2 hosts: {'train' if fleet.end_of_a_round(2, STEPS_OF_A_ROUND) else 'DO NOT TRAIN'}", flush=True)
        for number in range(n_rounds):
            absent = [host for host in range(1, N_HOSTS) if host not in fleet.up]
            host = rng.choice(absent) if absent and (len(fleet.up) == 1 or rng.random() < 0.5) else None
            if host is not None:
                what = f"host {host} comes"
                fleet.start(host)
            else:
                host, way = rng.choice(fleet.up[1:]), rng.choice(["is killed", "loses its power", "is told to stop"])
                what = f"host {host} {way}"
                if way == "is told to stop":
                    fleet.stop(host)
                else:
                    fleet.lose(host, cut=way == "loses its power")
            began = time.monotonic()
            is_well = fleet.end_of_a_round(len(fleet.up), STEPS_OF_A_ROUND)
            seconds = time.monotonic() - began
            failed, worst = failed + (not is_well), max(worst, seconds)
            outcome = f"{len(fleet.up)} hosts train after {seconds:.0f} s" if is_well else "DO NOT TRAIN"
            print(f"{number + 1:>4}  {what:<24} {outcome}", flush=True)
        restarted = fleet.restarted
    found = samples_of_steps(directory)
    steps = range(max(found) + 1)
    truth = undisturbed(root / "undisturbed", len(steps))
    missing = [step for step in steps if step not in found]
    wrong = [step for step in steps if any(samples != truth[step][0] for samples in found.get(step, ()))]
    again = sum(len(times) - 1 for times in found.values())
    print(
        f"{n_rounds} rounds: {len(steps)} steps, {again} of them trained again; without a record {len(missing)}, with "
        f"other samples than undisturbed {len(wrong)}; longest wait {worst:.0f} s; torchrun started again {restarted} x"
    )
    failed += len(missing) + len(wrong)
    if failed:
        print(f"what was left is in {root}", file=sys.stderr)
    else:
        shutil.rmtree(root)
    return failed
