"""A job of several hosts: equal to one on one host, quick to say what keeps it from running, and quick to end where a
host is lost, cut off or frozen; started again it ends as if nothing had been.

Hosts are network namespaces with real wires between them; it takes root and iproute2.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.job import Job
from tests.faults.kills import outcome
from tests.faults.namespaces import Hosts
from tests.faults.ranks import Attempt
from tools import elastic

LIMIT = 3.0
"""Seconds of silence that these jobs bear."""
NOTICED = 15.0
"""Within how many seconds after a fault all ranks that can have ended; their collectives would wait for 60."""


def job_of(ranks: int, **options: Any) -> Job:
    devices = {"host_timeout_seconds": LIMIT, "step_timeout_seconds": 60.0, "start_timeout_seconds": 60.0}
    return Job(ranks=ranks, devices=devices, **options)


BY_DEFAULT = {ranks: {"dp_replicate": 2, "dp_shard": ranks // 2} for ranks in (2, 4)}
"""The mesh that two hosts have by default."""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_hosts_train_what_one_does_though_their_names_lead_to_the_loopback(
    ranks: int, hosts: Hosts, truth: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with Attempt(job_of(ranks), tmp_path, hosts=hosts) as attempt:
        assert attempt.wait(60) == [0] * ranks, attempt.report()
    assert outcome(tmp_path) == truth(ranks, **BY_DEFAULT[ranks])
    described = (tmp_path / "described.md").read_text()
    assert f"| dp_replicate | 2 | 0, {ranks // 2} | between 2 hosts |" in described
    assert ("| dp_shard | 2 | 0, 1 | inside the host |" in described) == (ranks == 4)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_hosts_that_train_on_their_own_are_the_workers_of_one_host(ranks: int, hosts: Hosts, tmp_path: Path) -> None:
    rounds = {"every_n_steps": 8, "outer": "sgd"}
    found = []
    for name, workers, where in (("one", 2, None), ("two", "hosts", hosts)):
        directory = tmp_path / name
        directory.mkdir()
        with Attempt(job_of(ranks, local_sgd=rounds | {"workers": workers}), directory, hosts=where) as attempt:
            assert attempt.wait(60) == [0] * ranks, attempt.report()
        found.append(outcome(directory))
    assert found[0] == found[1]


def errors_of(job: Job, directory: Path, hosts: Hosts, environment: list[dict[str, str]]) -> list[str]:
    """What each rank says of a job that is refused at its start."""
    with Attempt(job, directory, hosts=hosts, environment=environment) as attempt:
        assert attempt.wait(30) == [1] * job.ranks, attempt.report()
    return [attempt.error(rank) for rank in range(job.ranks)]


def test_an_interface_that_leads_nowhere_is_refused_on_all_ranks_at_once(hosts: Hosts, tmp_path: Path) -> None:
    environment = [{}, {"GLOO_SOCKET_IFNAME": "lo"}]
    for error in errors_of(job_of(2), tmp_path, hosts, environment):
        assert "GLOO_SOCKET_IFNAME=lo: only this host is reached by it, and the job has several hosts" in error
        assert "Unset it, or set it to 'eth0', on the way to 10.77.0.1" in error
        assert "host 1 (" in error


FAULTS: dict[str, Callable[[Hosts, Attempt], None]] = {
    "silent": lambda hosts, attempt: hosts.silence(1),
    "the silent host has the store": lambda hosts, attempt: hosts.silence(0),
    "without power": lambda hosts, attempt: _without_power(hosts, attempt, 1),
    "without power, and the store": lambda hosts, attempt: _without_power(hosts, attempt, 0),
    "frozen": lambda hosts, attempt: attempt.send(signal.SIGSTOP, attempt.ranks_of(1, hosts)),
    "one process frozen": lambda hosts, attempt: attempt.send(signal.SIGSTOP, attempt.ranks_of(1, hosts)[-1:]),
}
ORDINARY = [("silent", 2)]


def _without_power(hosts: Hosts, attempt: Attempt, host: int) -> None:
    hosts.cut(host)  # first, so that no connection of its processes is closed to the others
    attempt.send(signal.SIGKILL, attempt.ranks_of(host, hosts))


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        pytest.param(fault, ranks, marks=[] if (fault, ranks) in ORDINARY else pytest.mark.slow)
        for fault in FAULTS
        for ranks in (2, 4)
        if (fault, ranks) != ("one process frozen", 2)  # which is its host
    ],
)
def test_a_lost_host_ends_the_job_in_seconds_and_started_again_it_ends_as_undisturbed(
    fault: str, ranks: int, hosts: Hosts, truth: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    job = job_of(ranks, step_seconds=0.1)
    lost = 0 if "store" in fault else 1
    with Attempt(job, tmp_path, hosts=hosts) as attempt:
        assert attempt.wait_for("saved 4")
        FAULTS[fault](hosts, attempt)
        began = time.monotonic()
        survivors = attempt.ranks_of(1 - lost, hosts)
        try:
            while any(attempt.codes()[rank] is None for rank in survivors):
                assert time.monotonic() - began < NOTICED, attempt.report()
                time.sleep(0.05)
        finally:
            hosts.hear(lost) if "silent" in fault else hosts.mend(lost)
        assert all(attempt.codes()[rank] == 1 for rank in survivors), attempt.report()
    said = attempt.report()
    assert "[rank " in said
    assert said.count("failed, the job ends") >= 1
    if fault == "one process frozen":
        assert f"the process of rank {ranks - 1} on host 1 (" in said
        assert "has been stopped for" in said
    elif lost == 1:
        assert "host 1 (" in said
        assert "has not been heard of for" in said
    else:
        assert "the job's store at 10.77.0.1:" in said
        assert "has not answered host 1 (" in said
    assert "at step " in said

    with Attempt(job, tmp_path, 1, hosts=hosts) as attempt:
        assert attempt.wait(60) == [0] * ranks, attempt.report()
    assert attempt.numbers("resumed") >= [4]
    assert outcome(tmp_path) == truth(ranks, **BY_DEFAULT[ranks])


def test_shorter_silence_changes_nothing(hosts: Hosts, truth: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with Attempt(job_of(2, step_seconds=0.1), tmp_path, hosts=hosts) as attempt:
        assert attempt.wait_for("step 4")
        hosts.silence(1)
        time.sleep(LIMIT / 3)
        hosts.hear(1)
        assert attempt.wait(60) == [0, 0], attempt.report()
    assert outcome(tmp_path) == truth(2, **BY_DEFAULT[2])


@pytest.mark.parametrize(("restarts", "code"), [(3, 143), pytest.param(0, 0, marks=pytest.mark.slow)])
def test_where_another_host_was_told_to_stop_torchrun_is_made_to_start_this_ones_ranks_again(
    restarts: int, code: int, hosts: Hosts, truth: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    of_torchrun = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": str(restarts)}
    job = job_of(2, step_seconds=0.1)
    with Attempt(job, tmp_path, hosts=hosts, environment=[of_torchrun] * 2) as attempt:
        assert attempt.wait_for("step 5")
        attempt.send(signal.SIGTERM, attempt.ranks_of(1, hosts))
        assert attempt.wait(NOTICED) == [code, 0], attempt.report()
        (stopped,) = attempt.numbers("interrupted")
    with Attempt(job, tmp_path, 1, hosts=hosts) as attempt:
        assert attempt.wait(60) == [0, 0], attempt.report()
        assert attempt.numbers("resumed") == [stopped]
    assert outcome(tmp_path) == truth(2, **BY_DEFAULT[2])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("hosts")
def test_hosts_come_and_go_and_each_step_has_the_samples_of_the_undisturbed_run() -> None:
    assert elastic.main(10, seed=0) == 0


def test_hosts_with_other_code_are_refused_on_all_ranks(hosts: Hosts, tmp_path: Path) -> None:
    environment = []
    for host in range(2):
        directory = tmp_path / f"code_{host}"
        directory.mkdir()
        (directory / "own.py").write_text(f"VALUE = {host}\n")
        environment.append({"OWN_CODE": str(directory)})
    for error in errors_of(job_of(2, imports="own"), tmp_path, hosts, environment):
        assert "RanksDifferError: the hosts of this job differ: the digest of own's code is " in error


def test_hosts_with_other_numbers_of_ranks_are_refused_on_all_ranks(hosts: Hosts, tmp_path: Path) -> None:
    """Else the mesh, workers and local checkpoints of some ranks would take other ranks for those of their host."""
    environment = [{}, {"LOCAL_WORLD_SIZE": "1"}]
    mesh = {"dp_replicate": 1, "dp_shard": 4}
    job = Job(ranks=4, devices=mesh | {"start_timeout_seconds": 30.0})
    for error in errors_of(job, tmp_path, hosts, environment):
        assert "RanksDifferError: the hosts of this job differ: the number of its processes is 2 on host 0 (" in error
