"""A restart on the same host reads of the object store what says which checkpoint is the newest, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.faults.job import Job, run_dir
from tests.faults.kills import outcome
from tests.faults.phases import Fault
from tests.faults.ranks import Attempt
from tests.faults.torchrun import report, torchrun
from tests.stores.servers import Server


@pytest.mark.parametrize("phase", ["before the rename", pytest.param("after the rename", marks=pytest.mark.slow)])
def test_killed_and_restarted_by_torchrun_it_goes_on_from_memory(
    phase: str, url: str, s3: Server, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    job = Job(ranks=2, n_steps=12, checkpoint={"save_every_n_steps": 2})
    (tmp_path / "straight").mkdir()
    with Attempt(job, tmp_path / "straight") as attempt:
        assert attempt.wait(60) == [0, 0], attempt.report()

    saves = {"directory": url, "save_every_n_steps": 4, "local_directory": str(memory), "save_local_every_n_steps": 1}
    # Checkpoints of steps 1 and 4 with their local copies, and local ones of 2, 3, 5 and 6: the eighth is that of 6.
    fault = Fault(phase=phase, calls=(8,), victims=(0, 1))
    with torchrun(replace(job, checkpoint=saves, fault=fault), tmp_path, max_restarts=1) as agent:
        assert agent.wait(120) == 0, report(tmp_path)
    resumed = 5 if phase == "before the rename" else 6
    diary = (tmp_path / "attempts/001/rank_1.log").read_text().splitlines()
    assert diary[0] == f"resumed {resumed}", report(tmp_path)
    assert outcome(tmp_path) == outcome(tmp_path / "straight")
    record = json.loads((run_dir(tmp_path) / "run.json").read_text())
    assert record["resumed_from"].startswith(str(memory))
    assert record["resumed_from"].endswith(f"step_{resumed:08d}")

    read = {unquote(path).rpartition("/")[2] for method, path, _ in s3.requests if method == "GET"}
    assert {name for name in read if name.endswith((".distcp", ".metadata", ".safetensors"))} == set()
    assert {name for name in read if name.startswith(("rank_", "shared"))} == set()
    assert "manifest.json" in read
