"""A run that is killed at any instant and started again by the same command ends as the one that was not, bit for bit.

Ten kills here, twenty with `--all`; `tools/faults.sh` does two hundred.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from tests.faults.job import Job, Pause
from tests.faults.kills import (
    KINDS,
    RANDOM,
    SECONDS_OF_A_RUN,
    SECONDS_TO_NOTICE,
    Plan,
    job_for,
    listed,
    outcome,
    straight,
    trial,
)
from tests.faults.phases import Fault
from tests.faults.ranks import Attempt
from tests.faults.torchrun import report, torchrun

# By ranks and whether saves are asynchronous: all ranks are killed, or one of them alone where there is a star.
PLANS: dict[tuple[int, bool], list[Plan]] = {
    key: [Plan(kind.rstrip("*"), one_rank=kind.endswith("*")) for kind in kinds.split(", ")]
    for key, kinds in {
        (1, False): f"after staging, before the rename, {RANDOM}, after the first shard, after the rename",
        (1, True): f"before the manifest, in the midst of retention, after staging, before the rename, {RANDOM}",
        (2, False): "after the first shard*, before the manifest, in the midst of retention*, after the rename*, "
        f"{RANDOM}*",
        (2, True): f"after staging*, after the first shard, before the manifest*, in the midst of retention, {RANDOM}*",
    }.items()
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """The outcome of the undisturbed run and what it keeps, by number of ranks; saved synchronously."""
    return cache(lambda ranks: straight(job_for(ranks=ranks, is_async=False), tmp_path_factory.mktemp("straight")))


ORDINARY = ((1, False), (2, True))


def test_every_kind_of_kill_is_among_them() -> None:
    assert {plan.kind for plans in ORDINARY for plan in PLANS[plans]} == set(KINDS)


@pytest.mark.pitfall(29)
@pytest.mark.pitfall(30)
@pytest.mark.parametrize(
    ("ranks", "is_async"), [pytest.param(*case, marks=[] if case in ORDINARY else pytest.mark.slow) for case in PLANS]
)
def test_a_killed_run_that_is_started_again_ends_as_the_one_that_was_not(
    ranks: int, is_async: bool, truth: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    plans = PLANS[ranks, is_async]
    kills = trial(job_for(ranks=ranks, is_async=is_async), tmp_path, truth(ranks), plans, seed=ranks + 10 * is_async)
    assert [kill.plan for kill in kills] == plans


def test_a_killed_rank_is_noticed_though_its_loaders_worker_sits_in_a_sample(tmp_path: Path) -> None:
    """A forked worker has the dead rank's sockets open."""
    job = Job(ranks=2, workers=1, pause=Pause(where="train", rank=1, sample=11))
    with Attempt(job, tmp_path) as attempt:
        attempt.wait_for_file(tmp_path / "paused")
        attempt.send(SIGKILL, [1])
        assert attempt.wait(SECONDS_TO_NOTICE) == [1, -9], attempt.report()


@pytest.mark.pitfall(29)
@pytest.mark.pitfall(31)
def test_under_torchrun_a_killed_rank_goes_on_by_itself(truth: Callable[[int], dict[str, Any]], tmp_path: Path) -> None:
    """Killed when the fourth checkpoint is about to be published, so the third is the newest."""
    fault = Fault(phase="before the rename", calls=(4,), victims=(1,))
    with torchrun(replace(job_for(ranks=2, is_async=True), fault=fault), tmp_path, max_restarts=3) as agent:
        assert agent.wait(SECONDS_OF_A_RUN) == 0, report(tmp_path)
    expected = truth(2)
    assert outcome(tmp_path) | {"kept": listed(tmp_path)} == expected
    starts = sorted(path.name for path in (tmp_path / "attempts").iterdir())
    assert starts == ["000", "001"]
    first, second = ((tmp_path / "attempts" / start / "rank_1.log").read_text().split("\n") for start in starts)
    assert "step 8" in first
    assert "step 24" not in first
    assert second[0] in ("resumed 6", "resumed 8")
