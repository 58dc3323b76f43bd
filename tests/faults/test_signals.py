"""SIGTERM, SIGHUP, SIGINT and SIGUSR1 to any rank at any moment: all stop or save at one step, and nothing is lost."""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1
from typing import Any

import pytest

from tests.api import read_jsonl
from tests.faults.job import VALIDATE_EVERY, Job, Pause, run_dir
from tests.faults.kills import SECONDS_OF_A_RUN, listed, outcome
from tests.faults.phases import Fault
from tests.faults.ranks import Attempt
from tests.faults.torchrun import report, torchrun

SECONDS_TO_STOP = 60.0
# No multiple of any step at which these runs stop.
EVERY = {"save_every_n_steps": 7}
SLOW_SAVE = Fault(phase="before the rename", does="sleep", seconds=2.0, calls=(1,))
MOMENTS: dict[str, dict[str, Any]] = {
    "before the first step": {"pause": Pause(where="setup", seconds=1.0)},
    "in the first data wait": {"pause": Pause(where="train", rank=1, sample=2)},  # after setup's first and last sample
    "in a data wait": {"pause": Pause(where="train", rank=1, sample=10)},
    "in a data wait of a worker": {"pause": Pause(where="train", rank=1, sample=11), "workers": 1},
    "in validation": {"pause": Pause(where="val", rank=1, sample=2)},
    "in validation, of a worker": {"pause": Pause(where="val", rank=1, sample=2), "workers": 1},
    "during a save": {"fault": SLOW_SAVE},
    "in training": {},
    "in training with workers": {"workers": 1},
}


@dataclass(frozen=True)
class Case:
    """A signal to some ranks, at a moment."""

    ranks: int
    moment: str
    to: str
    """"0", "1", "all"; "groups", loaders' workers too; "twice", or "repeatedly" till it ends, to the last rank."""
    number: signal.Signals = SIGTERM
    is_async: bool = True

    def __str__(self) -> str:
        saving = "async" if self.is_async else "sync"
        return f"{self.number.name} to {self.to} of {self.ranks} {self.moment}, {saving}"

    @property
    def job(self) -> Job:
        options = MOMENTS[self.moment]
        if "pause" in options and self.ranks == 1:
            pause = options["pause"]
            # One rank alone does not look at samples in setup.
            sample = 0 if self.moment == "in the first data wait" else pause.sample
            options = options | {"pause": replace(pause, rank=0, sample=sample)}
        return Job(ranks=self.ranks, checkpoint=EVERY | {"async_save": self.is_async}, **options)

    def reach(self, attempt: Attempt, directory: Path) -> None:
        """Waits for the moment."""
        if attempt.job.pause is not None:
            attempt.wait_for_file(directory / "paused")
        elif attempt.job.fault is not None:
            attempt.wait_for_file(attempt.directory / "struck")
        else:
            assert attempt.wait_for("step 9", ranks=range(self.ranks)), attempt.report()
            return
        time.sleep(0.2)

    def send(self, attempt: Attempt) -> None:
        last = self.ranks - 1
        if self.to == "groups":
            attempt.send_to_groups(self.number)
            return
        attempt.send(self.number, {"0": [0], "all": range(self.ranks)}.get(self.to, [last]))
        if self.to == "twice":
            time.sleep(0.2)
            attempt.send(self.number, [last])
        until = time.monotonic() + SECONDS_TO_STOP
        while self.to == "repeatedly" and attempt.codes()[last] is None and time.monotonic() < until:
            attempt.send(self.number, [last])
            time.sleep(0.02)


def cases() -> Iterator[Case]:
    """Every moment with everyone it may come to; the two ways of saving in turn."""
    for moment in MOMENTS:
        for index, to in enumerate(("0", "1", "all", "twice", "groups", "repeatedly")):
            yield Case(2, moment, to, is_async=index % 2 == 0)
            if to not in ("1", "all"):
                yield Case(1, moment, to, is_async=index % 2 == 1)
        yield Case(2, moment, "1", SIGINT)
        yield Case(2, moment, "1", SIGHUP, is_async=False)
        yield Case(1, moment, "groups", SIGINT, is_async=False)


SPANNING = [
    Case(2, "before the first step", "1"),
    Case(2, "in the first data wait", "0"),
    Case(2, "in a data wait of a worker", "groups"),
    Case(1, "in a data wait", "twice", SIGHUP),
    Case(2, "in validation", "1"),
    Case(2, "during a save", "twice", is_async=False),
    Case(2, "in training", "repeatedly"),
    Case(1, "in training with workers", "groups", SIGINT),
]
CASES = [pytest.param(case, id=str(case)) for case in SPANNING]
CASES += [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in cases() if case not in SPANNING]


def stopped_at(attempt: Attempt, directory: Path) -> int:
    """The step at which all ranks ended, of which there is a checkpoint."""
    steps = [max([0, *attempt.numbers("step", rank)]) for rank in range(attempt.job.ranks)]
    assert len(set(steps)) == 1, attempt.report()
    interrupted = [attempt.numbers("interrupted", rank) for rank in range(attempt.job.ranks)]
    assert interrupted == [[steps[0]]] * attempt.job.ranks, attempt.report()
    assert listed(directory)[-1] == steps[0], attempt.report()
    assert steps[0] < attempt.job.n_steps
    return steps[0]


def check_resumed(job: Job, directory: Path, step: int, truth: dict[str, Any], number: int = 1) -> None:
    """Started again, the run goes on from `step` and ends as the one that was never stopped."""
    with Attempt(replace(job, fault=None), directory, number) as attempt:
        assert attempt.wait(SECONDS_OF_A_RUN) == [0] * job.ranks, attempt.report()
        assert attempt.numbers("resumed") == [step], attempt.report()
    assert outcome(directory) == truth
    validated = [line["step"] for line in read_jsonl(run_dir(directory) / "metrics.jsonl") if "val/loss" in line]
    assert validated == [*range(VALIDATE_EVERY, job.n_steps + 1, VALIDATE_EVERY)]


@pytest.mark.pitfall(42)
@pytest.mark.parametrize("case", CASES)
def test_a_signal_stops_all_ranks_at_one_step_and_the_resumed_run_is_the_straight_one(
    case: Case, truth: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    job = case.job
    with Attempt(job, tmp_path) as attempt:
        case.reach(attempt, tmp_path)
        case.send(attempt)
        code = 128 + (SIGTERM if case.number == SIGHUP else case.number)
        assert attempt.wait(SECONDS_TO_STOP) == [code] * job.ranks, attempt.report()
        step = stopped_at(attempt, tmp_path)
    assert (step == 0) is ("first" in case.moment)
    check_resumed(job, tmp_path, step, truth(job.ranks))


@pytest.mark.pitfall(42)
@pytest.mark.parametrize(
    ("moment", "rank"),
    [
        ("in training", 1),
        ("in a data wait", 0),
        pytest.param("in a data wait", 1, marks=pytest.mark.slow),
        pytest.param("in a data wait of a worker", 0, marks=pytest.mark.slow),
        pytest.param("in validation", 0, marks=pytest.mark.slow),
        pytest.param("in validation", 1, marks=pytest.mark.slow),
        pytest.param("in validation, of a worker", 1, marks=pytest.mark.slow),
    ],
)
def test_sigusr1_to_one_rank_saves_and_the_run_goes_on(
    moment: str, rank: int, truth: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    """In a wait the checkpoint is there before the wait is over."""
    case = Case(2, moment, str(rank), SIGUSR1)
    job = replace(case.job, checkpoint={"save_every_n_steps": None})
    with Attempt(job, tmp_path) as attempt:
        case.reach(attempt, tmp_path)
        case.send(attempt)
        if job.pause is not None:
            deadline = time.monotonic() + job.pause.seconds - 10
            while not listed(tmp_path) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert listed(tmp_path), attempt.report()
            (tmp_path / "goes on").touch()
        assert attempt.wait(SECONDS_OF_A_RUN) == [0, 0], attempt.report()
        first, last = listed(tmp_path)
        assert 0 < first < last == job.n_steps
        assert first - attempt.numbers("step")[0] < 12
        assert attempt.numbers("interrupted") == []
    assert outcome(tmp_path) == truth(2)


@pytest.mark.pitfall(42)
def test_sigterm_to_torchrun_in_a_data_wait_saves_before_torchrun_kills(
    truth: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    """As a scheduler preempts: torchrun hands it on to every rank and the workers of its loaders."""
    job = Case(2, "in a data wait of a worker", "all").job
    with torchrun(job, tmp_path) as agent:
        deadline = time.monotonic() + SECONDS_OF_A_RUN
        while not (tmp_path / "paused").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        agent.send_signal(SIGTERM)
        agent.wait(SECONDS_TO_STOP + 5)
    steps = listed(tmp_path)
    assert len(steps) == 1, report(tmp_path)
    assert 3 <= steps[0] <= 5
    check_resumed(job, tmp_path, steps[0], truth(2))
