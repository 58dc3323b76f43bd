"""A run over packed rows is killed twice and goes on with other ranks: every step, also one trained again, has the
tokens of a run that nobody killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_packed_mixture import Job
from tests.faults.packed_job import SEED
from tests.trainer.small import ROOT
from tests.worlds import free_port, rank_environment

STEPS = 24
ATTEMPTS = [(2, 2, 1, 6), (1, 0, 4, 14), (4, 0, 1, None)]
"""(ranks, workers, accumulation, steps written down before all are killed)"""


def run(directory: Path, attempt: int) -> list[int]:
    """Starts the ranks and kills them when it is time; their exit codes."""
    ranks, workers, accumulation, kill_after = ATTEMPTS[attempt]
    port = free_port()
    arguments = [f"attempt{attempt}", *map(str, (ranks, workers, accumulation, STEPS))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.packed_job", *arguments],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | rank_environment(rank, ranks, port),
            stderr=(directory / f"{attempt}_{rank}.err").open("w"),
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    try:
        if kill_after is not None:
            deadline = time.monotonic() + 90
            while max(steps_of(directory, attempt), default=0) < kill_after and time.monotonic() < deadline:
                assert processes[0].poll() is None, (directory / f"{attempt}_0.err").read_text()
                time.sleep(0.01)
            for process in processes:
                os.killpg(process.pid, signal.SIGKILL)
        return [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def steps_of(directory: Path, attempt: int) -> dict[int, str]:
    """A digest of the tokens of each step that all ranks wrote down whole, in global order."""
    ranks, _, accumulation, _ = ATTEMPTS[attempt]
    found: dict[int, list[list[list[int]]]] = defaultdict(lambda: [[] for _ in range(ranks)])
    for rank in range(ranks):
        path = directory / f"attempt{attempt}_{rank}.jsonl"
        for line in path.read_text().split("\n")[:-1] if path.exists() else []:
            step, tokens = json.loads(line)
            found[step][rank].append(tokens)
    digests = {}
    for step, per_rank in found.items():
        if all(len(micro_batches) == accumulation for micro_batches in per_rank):
            tokens = [token for chunk in zip(*per_rank, strict=True) for part in chunk for token in part]
            digests[step] = hashlib.sha256(np.array(tokens).tobytes()).hexdigest()
    return digests


@pytest.mark.slow
def test_every_step_of_a_run_that_is_killed_twice_has_the_tokens_of_one_that_is_not(tmp_path: Path) -> None:
    expected = [digest for digest, _ in Job((1, 1, 0), seed=SEED).steps(STEPS)[0]]
    assert len(set(expected)) == STEPS
    seen: list[set[int]] = []
    for attempt, (_, _, _, kill_after) in enumerate(ATTEMPTS):
        codes = run(tmp_path, attempt)
        assert set(codes) == {0 if kill_after is None else -signal.SIGKILL}, (tmp_path / f"{attempt}_0.err").read_text()
        found = steps_of(tmp_path, attempt)
        assert {step: expected[step] for step in found} == found
        seen.append(set(found))
    assert set.union(*seen) == set(range(STEPS))
    assert 0 < min(seen[1]) <= max(seen[0]) + 1
    assert min(seen[1]) < min(seen[2]) <= max(seen[1]) + 1
