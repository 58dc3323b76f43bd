"""SIGTERM to a whole process group, as schedulers send it, while workers of somebody else's loader load."""

from pathlib import Path
from signal import SIGTERM

import pytest

from tests.faults.job import Job
from tests.faults.kills import listed
from tests.faults.ranks import Attempt


@pytest.mark.pitfall(82)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("stateful-plain", 1), pytest.param("stateful-persistent", 1, marks=pytest.mark.slow), ("own-plain", 2)],
)
def test_a_signal_to_the_group_saves_though_workers_get_it_too(kind: str, ranks: int, tmp_path: Path) -> None:
    job = Job(ranks=ranks, n_steps=5000, step_seconds=0.0, foreign=kind, checkpoint={"save_every_n_steps": None})
    with Attempt(job, tmp_path) as attempt:
        assert attempt.wait_for("step 2"), attempt.report()
        attempt.send_to_groups(SIGTERM)
        assert attempt.wait(40) == [128 + SIGTERM] * ranks, attempt.report()
    assert "killed by signal" not in "".join(attempt.error(rank) for rank in range(ranks))
    assert listed(tmp_path), attempt.report()
