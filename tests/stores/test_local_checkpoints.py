"""A restart on the same host reads of the object store what says which checkpoint is the newest, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.faults.job import Job, run_dir
from tests.faults.kills import outcome, straight
from tests.faults.phases import Fault
from tests.faults.ranks import Attempt
from tests.faults.torchrun import report, torchrun
from tests.stores.servers import Server

# Checkpoints of steps 1 and 4 with their local copies, and local ones of 2, 3, 5 and 6: the eighth is that of 6.
FAULT = Fault(phase="before the rename", calls=(8,), victims=(0, 1))


def job_of(url: str, memory: Path) -> Job:
    saves = {"directory": url, "save_every_n_steps": 4, "local_directory": str(memory), "save_local_every_n_steps": 1}
    return Job(ranks=2, n_steps=12, checkpoint=saves)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an undisturbed run ends with."""
    found = straight(Job(ranks=2, n_steps=12), tmp_path_factory.mktemp("straight"))
    del found["kept"]
    return found


def check(directory: Path, memory: Path, s3: Server, resumed: int, truth: dict[str, Any]) -> None:
    assert (directory / "attempts/001/rank_1.log").read_text().splitlines()[0] == f"resumed {resumed}"
    assert outcome(directory) == truth
    record = json.loads((run_dir(directory) / "run.json").read_text())
    assert record["resumed_from"].startswith(str(memory))
    assert record["resumed_from"].endswith(f"step_{resumed:08d}")

    read = {unquote(path).rpartition("/")[2] for method, path, _ in s3.requests if method == "GET"}
    assert {name for name in read if name.endswith((".distcp", ".metadata", ".safetensors"))} == set()
    assert {name for name in read if name.startswith(("rank_", "shared"))} == set()
    assert "manifest.json" in read


def test_killed_and_started_again_it_goes_on_from_memory(
    url: str, s3: Server, truth: dict[str, Any], tmp_path: Path
) -> None:
    job = job_of(url, tmp_path / "memory")
    with Attempt(replace(job, fault=FAULT), tmp_path) as attempt:
        assert attempt.wait(60) == [-9, -9], attempt.report()
    with Attempt(job, tmp_path, 1) as attempt:
        assert attempt.wait(60) == [0, 0], attempt.report()
    check(tmp_path, tmp_path / "memory", s3, 5, truth)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "resumed"), [("before the rename", 5), ("after the rename", 6)])
def test_killed_and_restarted_by_torchrun_it_goes_on_from_memory(
    phase: str, resumed: int, url: str, s3: Server, truth: dict[str, Any], tmp_path: Path
) -> None:
    job = job_of(url, tmp_path / "memory")
    with torchrun(replace(job, fault=replace(FAULT, phase=phase)), tmp_path, max_restarts=1) as agent:
        assert agent.wait(120) == 0, report(tmp_path)
    check(tmp_path, tmp_path / "memory", s3, resumed, truth)
