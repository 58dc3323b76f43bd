"""A checkpoint that cannot be written, on any rank, for any reason: all ranks hear of it, and what was there stays."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.job import Job
from tests.faults.kills import SECONDS_OF_A_RUN, listed, outcome
from tests.faults.phases import Fault
from tests.faults.ranks import Attempt
from tests.faults.small_disk import SmallDisk

SECONDS_TO_FAIL = 15.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(SmallDisk(tmp_path))
        except OSError as error:
            pytest.skip(str(error))
        yield found


def remount(disk: SmallDisk, option: str) -> None:
    """As "ro" or "rw"; the kernel refuses the first while a file is open for writing."""
    deadline = time.monotonic() + 10
    while subprocess.run(["mount", "-o", f"remount,{option}", str(disk.path)], capture_output=True).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def job_for(*, ranks: int = 2, is_async: bool, on_error: str = "raise", fault: Fault | None = None) -> Job:
    options = {"save_every_n_steps": 2, "async_save": is_async, "on_save_error": on_error}
    return Job(ranks=ranks, step_seconds=0.05, checkpoint=options, fault=fault)


def check_all_fail(attempt: Attempt, reason: str) -> None:
    """Every rank ends with an error that names it, in seconds."""
    assert attempt.wait(SECONDS_TO_FAIL) == [1] * attempt.job.ranks, attempt.report()
    for rank in range(attempt.job.ranks):
        assert "CheckpointError" in attempt.error(rank), attempt.report()
    assert reason in "".join(attempt.error(rank) for rank in range(attempt.job.ranks)), attempt.report()


def check_goes_on(job: Job, directory: Path, truth: dict[str, Any], newest: int) -> None:
    """The same command, once the fault is gone, goes on from the newest checkpoint as if nothing had been."""
    with Attempt(replace(job, fault=None), directory, 1) as attempt:
        assert attempt.wait(SECONDS_OF_A_RUN) == [0] * job.ranks, attempt.report()
        assert attempt.numbers("resumed") == [newest]
    assert outcome(directory) == truth


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all(
    is_async: bool, disk: SmallDisk, truth: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    """Rank 0 has written its part of the third checkpoint by then."""
    job = job_for(is_async=is_async, fault=disk.filled_by(rank=1))
    with Attempt(job, tmp_path) as attempt:
        check_all_fail(attempt, "No space left on device")
        assert "rank 1: " in attempt.error(0) + attempt.error(1)
        assert "rank 0: " not in attempt.error(0) + attempt.error(1)
    assert listed(tmp_path) == [2, 4]
    disk.empty()
    check_goes_on(job, tmp_path, truth(2), newest=4)
    assert listed(tmp_path) == [*range(2, job.n_steps + 1, 2)]


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_disk_that_turns_read_only_is_an_error_on_all(
    is_async: bool, disk: SmallDisk, truth: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    job = job_for(is_async=is_async)
    with Attempt(job, tmp_path) as attempt:
        assert attempt.wait_for("saved 4"), attempt.report()
        remount(disk, "ro")
        before = listed(tmp_path)
        check_all_fail(attempt, "Read-only file system")
    assert listed(tmp_path) == before
    remount(disk, "rw")
    check_goes_on(job, tmp_path, truth(2), newest=before[-1])
    assert listed(tmp_path)[-2:] == [22, 24]


@pytest.mark.parametrize(
    ("fault", "ranks", "is_async"),
    [
        *(("full", 1, True), ("read-only", 2, True)),
        *(pytest.param("full", *case, marks=pytest.mark.slow) for case in ((1, False), (2, True), (2, False))),
        pytest.param("read-only", 2, False, marks=pytest.mark.slow),
    ],
)
def test_with_warn_the_run_outlives_a_disk_that_takes_nothing_and_saves_again(
    fault: str, ranks: int, is_async: bool, disk: SmallDisk, truth: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    breaks, mends, told = {
        "full": (disk.fill, disk.empty, "No space left on device"),
        "read-only": (partial(remount, disk, "ro"), partial(remount, disk, "rw"), "Read-only file system"),
    }[fault]
    job = job_for(ranks=ranks, is_async=is_async, on_error="warn")
    with Attempt(job, tmp_path) as attempt:
        assert attempt.wait_for("saved 4"), attempt.report()
        breaks()
        step = attempt.numbers("step")[-1]
        assert attempt.wait_for(f"step {step + 6}"), attempt.report()
        mends()
        assert attempt.wait(SECONDS_OF_A_RUN) == [0] * ranks, attempt.report()
        assert told in attempt.error(0), attempt.report()
    steps = listed(tmp_path)
    assert steps[:2] == [2, 4]
    assert not {step + 3, step + 4} & {*steps}
    assert {22, 24} <= {*steps}
    assert outcome(tmp_path) == truth(ranks)
