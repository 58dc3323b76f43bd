"""Local checkpoints: a job killed at any instant goes on from the newest state that all its hosts have, or from its
newest checkpoint, and ends bit for bit as the one that was not killed.

Hosts are network namespaces here, each with a home directory of its own, in which it keeps its part.
"""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.states import flip
from tests.faults.job import Job, run_dir
from tests.faults.kills import listed, outcome
from tests.faults.namespaces import Hosts
from tests.faults.phases import Fault
from tests.faults.ranks import Attempt

SAVES = {"save_every_n_steps": 8, "save_local_every_n_steps": 1}
ON_HOSTS = {"host_timeout_seconds": 3.0, "step_timeout_seconds": 60.0, "start_timeout_seconds": 60.0}


def job_of(ranks: int, directory: str | Path, **options: Any) -> Job:
    return Job(ranks=ranks, checkpoint=SAVES | {"local_directory": str(directory)}, **options)


def kept(directory: Path) -> list[str]:
    """The steps whose states lie there, for each part."""
    return sorted(f"{path.parent.parent.name} {path.name}" for path in directory.glob("*/*/ranks_*/*/step_*"))


def killed(job: Job, directory: Path, number: int, **options: Any) -> Attempt:
    """A start of the job in which all ranks are killed once they have trained some steps."""
    with Attempt(job, directory, number, **options) as attempt:
        assert attempt.wait_for("step 6")
        attempt.send(signal.SIGKILL, range(job.ranks))
        assert attempt.wait(20) == [-9] * job.ranks, attempt.report()
    return attempt


# The first save is a checkpoint of step 1 and its local copy, so the fifth is the local one of step 4. Between the two
# the checkpoint's manifest is encoded once more, for its digest.
@pytest.mark.parametrize(
    ("phase", "call", "resumed"),
    [
        pytest.param("after the first shard", 5, 3, marks=pytest.mark.slow),
        pytest.param("before the manifest", 6, 3, marks=pytest.mark.slow),
        ("before the rename", 5, 3),
        pytest.param("after the rename", 5, 4, marks=pytest.mark.slow),
    ],
)
def test_killed_while_a_local_one_is_written_it_goes_on_from_the_one_before_and_from_a_damaged_one_not_at_all(
    phase: str, call: int, resumed: int, truth: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    job = job_of(2, memory)
    with Attempt(replace(job, fault=Fault(phase=phase, calls=(call,), victims=(0, 1))), tmp_path) as attempt:
        assert attempt.wait(60) == [-9, -9], attempt.report()
    assert listed(tmp_path) == [1]  # local ones are none of the run's
    attempt = killed(job, tmp_path, 1)
    assert attempt.numbers("resumed") == [resumed], attempt.report()

    for shard in memory.glob("*/*/ranks_0-1/*/step_*/__1_0.distcp"):
        flip(shard)
    with Attempt(job, tmp_path, 2) as attempt:
        assert attempt.wait(60) == [0, 0], attempt.report()
        assert "a local checkpoint is not used" in attempt.error(0)
        assert attempt.numbers("resumed")[-1] == 1, attempt.report()
        assert attempt.numbers("saved") == [8, 16, 24]
    assert outcome(tmp_path) == truth(2)
    assert not list(memory.iterdir())  # it is finished


def homes_on(hosts: Hosts, directory: Path) -> tuple[list[Path], dict[str, Any]]:
    """A home directory for each host, and where a job runs that has them."""
    homes = [directory / f"host_{host}" for host in range(hosts.count)]
    for home in homes:
        home.mkdir()
    return homes, {"hosts": hosts, "environment": [{"HOME": str(home)} for home in homes]}


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        pytest.param(2, {"dp_replicate": 2, "dp_shard": 1}, marks=pytest.mark.slow),
        (2, {"dp_replicate": 1, "dp_shard": 2}),  # each host has half of the model
        pytest.param(4, {"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"dp_replicate": 1, "dp_shard": 4}, marks=pytest.mark.slow),
    ],
)
def test_two_hosts_go_on_from_what_both_have_and_from_the_checkpoint_where_one_has_lost_it(
    ranks: int, mesh: dict[str, int], hosts: Hosts, truth: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    homes, where = homes_on(hosts, tmp_path)
    job = job_of(ranks, "~/memory", devices=ON_HOSTS | mesh)
    killed(job, tmp_path, 0, **where)
    first, last = f"ranks_0-{ranks // 2 - 1}", f"ranks_{ranks // 2}-{ranks - 1}"
    both = [{line.split()[1] for line in kept(home / "memory")} for home in homes]
    assert [{line.split()[0] for line in kept(home / "memory")} for home in homes] == [{first}, {last}]
    assert all(len(steps) <= 2 for steps in both)  # the bound
    common = max(int(name[-8:]) for name in both[0] & both[1])
    attempt = killed(job, tmp_path, 1, **where)
    assert attempt.numbers("resumed") == [common], attempt.report()
    record = json.loads((run_dir(tmp_path) / "run.json").read_text())
    assert record["resumed_from"].startswith(str(homes[0] / "memory"))

    shutil.rmtree(homes[1] / "memory")  # this host was rebooted
    with Attempt(job, tmp_path, 2, **where) as attempt:
        assert attempt.wait(60) == [0] * ranks, attempt.report()
        assert all(attempt.numbers("resumed", rank) == [1] for rank in range(ranks)), attempt.report()
    assert outcome(tmp_path) == truth(ranks, **mesh)
    assert not any(kept(home / "memory") for home in homes)


def test_a_directory_that_hosts_share_is_refused_on_all_ranks(hosts: Hosts, tmp_path: Path) -> None:
    """Each would take the others' parts for what is left of an earlier start, and remove them."""
    with Attempt(job_of(2, tmp_path / "memory", devices=ON_HOSTS), tmp_path, hosts=hosts) as attempt:
        assert attempt.wait(60) == [1, 1], attempt.report()
    for rank in range(2):
        assert f"ConfigError: local_directory: several hosts have the same {tmp_path / 'memory'}" in attempt.error(rank)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4, "dp_shard": 1}])
def test_hosts_on_their_own_go_on_from_the_midst_of_a_round(mesh: dict[str, int], hosts: Hosts, tmp_path: Path) -> None:
    """Each keeps its worker's own weights, and of the average what its ranks hold."""
    straight, (_, where) = tmp_path / "straight", homes_on(hosts, tmp_path)
    straight.mkdir()
    job = job_of(4, "~/memory", devices=ON_HOSTS | mesh, local_sgd={"every_n_steps": 8, "outer": "sgd"})
    with Attempt(replace(job, checkpoint={}), straight, hosts=hosts) as attempt:
        assert attempt.wait(60) == [0] * 4, attempt.report()
    killed(job, tmp_path, 0, **where)
    with Attempt(job, tmp_path, 1, **where) as attempt:
        assert attempt.wait(60) == [0] * 4, attempt.report()
        assert all(attempt.numbers("resumed", rank)[0] > 1 for rank in range(4)), attempt.report()
    assert outcome(tmp_path) == outcome(straight)
