"""A run that stands still ends by itself, and every rank's stacks say where it stood. In real processes."""

import ctypes
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dream_trainer.distributed import watchdog
from tests.api import Watchdog
from tests.trainer.small import run_ranks

LIMIT = 1.0


def hurry() -> None:
    """Shortens everything but the limit, in a process of its own."""
    watchdog.LOOK_SECONDS, watchdog.ASK_SECONDS, watchdog.GRACE_SECONDS = 0.1, 0.3, 1.5


def watched(
    where: Callable[[], str] = lambda: "step 7", *, limit: float = LIMIT, patient: float = 60.0, **of_job: Any
) -> Watchdog:
    directory = Path("run/stacks")
    return Watchdog(where, lambda: limit, patient_limit_seconds=patient, directory=directory, **of_job)


def job_of_two() -> tuple[int, dict[str, Any], dist.TCPStore]:
    """This rank, what its watchdog is told of the job, and the job's store."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, multi_tenant=True)
    return rank, {"rank": rank, "world_size": 2, "store": dist.PrefixStore("job", store.clone())}, store


def run_alone(function: str, cwd: Path) -> tuple[int, str]:
    """Exit status and standard error of a function of this module in a process of its own, which ends in time."""
    code = f"from tests.distributed.test_watchdog import {function}; {function}()"
    return run_ranks(code, 1, cwd, timeout=50.0)[0]


def dozes() -> None:
    time.sleep(600)


def waits_for_the_others() -> None:
    dist.all_reduce(torch.ones(1))


def one_of_two_hangs() -> None:
    rank, of_job, store = job_of_two()
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
    waits_for_the_others()
    # Rank 0 would not notice for a minute: it is told.
    with watched(limit=3.0 if rank == 1 else 60.0, **of_job):
        dozes() if rank == 1 else waits_for_the_others()


@pytest.mark.pitfall(27)
def test_when_one_rank_stands_still_all_write_stacks_and_collectives_and_end_with_an_error(tmp_path: Path) -> None:
    ranks = run_ranks("from tests.distributed.test_watchdog import one_of_two_hangs as f; f()", 2, tmp_path)
    text = "".join(error for _, error in ranks)
    assert [status for status, _ in ranks] == [1, 1], text
    files = [tmp_path / f"run/stacks/rank_0000{rank}.txt" for rank in range(2)]
    for rank, (file, function) in enumerate(zip(files, ["waits_for_the_others", "dozes"], strict=True)):
        words = file.read_text()
        assert f"in {function}" in words
        assert words.index("thread MainThread") == words.index("thread ")
        assert f"rank {rank} of 2" in words
        assert "rank 1 made no progress for 3 s (step 7)" in words
    assert "rank 1 made no progress for 3 s (step 7)" in text
    assert str(tmp_path / "run/stacks") in text
    assert "hang_timeout_seconds" in text
    assert "wrote none" not in text
    assert text.count("failed, the job ends") == 1, text
    for rank in range(2):
        records = pickle.loads((tmp_path / f"run/flight_recorder/rank_{rank}").read_bytes())
        # The first was shared; rank 0 alone began a second.
        assert [entry["profiling_name"] for entry in records["entries"]] == ["gloo:all_reduce"] * (2 - rank)


def one_of_two_is_gone() -> None:
    hurry()
    watchdog.GATHER_SECONDS, watchdog.GRACE_SECONDS = 1.0, 20.0
    rank, of_job, _ = job_of_two()
    with watched(**of_job):
        if rank == 1:
            os._exit(3)
        dozes()


def test_a_rank_that_writes_no_stacks_is_named_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    (status, text), _ = run_ranks(
        "from tests.distributed.test_watchdog import one_of_two_is_gone as f; f()", 2, tmp_path
    )
    assert status == 1
    assert "1 of 2 ranks wrote none (1)" in text


def loads_data_for_ever() -> None:
    hurry()
    Path("run/stacks").mkdir(parents=True)
    Path("run/stacks/rank_00000.txt").write_text("an earlier attempt\n")
    helper = threading.Thread(target=dozes, name="a helper", daemon=True)
    helper.start()
    with watched():
        threading.Event().wait()  # what a queue without a producer does


def test_a_process_alone_that_stands_still_ends_too_and_keeps_what_an_earlier_attempt_wrote(tmp_path: Path) -> None:
    status, text = run_alone("loads_data_for_ever", tmp_path)
    assert status == 1
    assert "rank 0 made no progress for 1 s (step 7)" in text
    written = (tmp_path / "run/stacks/rank_00000.txt").read_text()
    assert written.startswith("an earlier attempt\n====")
    assert written.index("in loads_data_for_ever") < written.index("thread a helper") < written.index("in dozes")
    assert "in _watch" not in written


def holds_the_lock_and_keeps_no_files() -> None:
    hurry()
    with watched():
        time.sleep(0.5)
        ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the interpreter's lock, as a faulty extension does


def holds_the_lock() -> None:
    Path("run").mkdir()
    holds_the_lock_and_keeps_no_files()


def test_native_code_that_keeps_pythons_lock_for_ever_is_ended_by_the_backstop(tmp_path: Path) -> None:
    status, _ = run_alone("holds_the_lock", tmp_path)
    assert status == 1
    assert "in holds_the_lock" in (tmp_path / "run/stacks/rank_00000.txt").read_text()


@pytest.mark.slow
def test_without_a_run_directory_the_backstop_writes_to_standard_error(tmp_path: Path) -> None:
    status, text = run_alone("holds_the_lock_and_keeps_no_files", tmp_path)
    assert status == 1
    assert "in holds_the_lock_and_keeps_no_files" in text
    assert not list(tmp_path.iterdir())


def stands_still_where_nothing_can_be_written() -> None:
    hurry()
    Path("run").write_text("a file where a directory should be")
    with watched():
        dozes()


def test_stacks_that_cannot_be_written_are_printed(tmp_path: Path) -> None:
    status, text = run_alone("stands_still_where_nothing_can_be_written", tmp_path)
    assert status == 1
    assert "in dozes" in text
    assert "run/stacks/rank_00000.txt failed" in text


def moves_then_is_patient_then_stops() -> None:
    hurry()
    Path("run").mkdir()
    step = 0
    dog = watched(lambda: f"step {step}")
    with dog:
        until = time.monotonic() + 3 * LIMIT
        while time.monotonic() < until:  # progress
            time.sleep(0.4 * LIMIT)
            step += 1
        with dog.patient():
            time.sleep(3 * LIMIT)
        time.sleep(0.6 * LIMIT)  # the clock began anew
    time.sleep(LIMIT + watchdog.GRACE_SECONDS + 0.5)  # nobody watches
    with dog:  # again
        time.sleep(0.3)
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    assert not list(Path("run").iterdir())


def test_progress_patience_and_the_end_of_watching_raise_no_alarm_and_leave_nothing(tmp_path: Path) -> None:
    status, text = run_alone("moves_then_is_patient_then_stops", tmp_path)
    assert status == 0, text


def is_patient_for_ever() -> None:
    hurry()
    dog = watched(limit=0.2, patient=LIMIT)
    with dog, dog.patient():
        dozes()


def test_patience_ends_at_its_own_limit(tmp_path: Path) -> None:
    status, text = run_alone("is_patient_for_ever", tmp_path)
    assert status == 1
    assert "made no progress for 1 s" in text
