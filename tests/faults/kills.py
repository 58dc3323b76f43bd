"""Trials: a run that is killed again and again, restarted by the same command, and compared with an undisturbed one."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

from tests.api import Ranks, step_directories, verify_checkpoint
from tests.faults.job import Job, run_dir
from tests.faults.phases import PHASES, Fault
from tests.faults.ranks import Attempt

SAVE_EVERY = 2
RETENTION = {"keep_last": 2, "keep_every_n_steps": 6}
SECONDS_TO_NOTICE = 15.0
"""How long a rank may go on after another was killed."""
SECONDS_OF_A_RUN = 180  # a run that hangs; on a busy machine one takes a minute
RANDOM = "at a random instant"
KINDS = (RANDOM, *(phase for phase in PHASES if phase != "before its own shard"))  # at which disks fill up


@dataclass(frozen=True)
class Plan:
    """One kill of a trial."""

    kind: str
    one_rank: bool
    """Whether one rank is killed, and the others are to notice; else all."""


@dataclass(frozen=True)
class Kill:
    """What a kill did."""

    plan: Plan
    ranks: int
    is_async: bool
    lost: int
    """Steps to train again."""
    seconds_to_end: float
    """From the first rank's end to the last one's."""


def job_for(*, ranks: int, is_async: bool) -> Job:
    """The run that is killed."""
    return Job(ranks=ranks, checkpoint={"save_every_n_steps": SAVE_EVERY, "async_save": is_async, **RETENTION})


def straight(job: Job, directory: Path) -> dict[str, Any]:
    """The outcome of the run that nobody disturbs, and the checkpoints it leaves."""
    with Attempt(job, directory) as attempt:
        codes = attempt.wait(SECONDS_OF_A_RUN)
        assert codes == [0] * job.ranks, attempt.report()
    return outcome(directory) | {"kept": listed(directory)}


def outcome(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "outcome.json").read_text()))


def listed(directory: Path) -> list[int]:
    """Steps of the checkpoints that anyone can see, each read through; one that is not whole fails the test."""
    found = step_directories(run_dir(directory) / "checkpoints")
    for step, path in found:
        assert verify_checkpoint(path, world=Ranks.alone()).step == step
    return [step for step, _ in found]


def trial(job: Job, directory: Path, truth: dict[str, Any], plans: Sequence[Plan], seed: int) -> list[Kill]:
    """Kills the run as planned, restarting it each time, and lets it end."""
    rng = random.Random(seed)
    kills: list[Kill] = []
    newest, number = 0, 0
    for number, plan in enumerate(plans):
        if job.n_steps - newest < _steps_wanted(plan):
            continue
        with _started(job, directory, number, plan, newest, rng) as attempt:
            if plan.kind == RANDOM:
                _kill_at_random(attempt, newest, _victims(plan, job.ranks, rng), rng)
            seconds = _end(attempt)
            if plan.kind == RANDOM and attempt.codes() == [0] * job.ranks:
                newest = job.n_steps
                continue  # it ended before the kill came
            kills.append(_check_kill(attempt, plan, newest, listed(directory), seconds))
        newest = max(listed(directory), default=0)
    with Attempt(job, directory, number + 1) as attempt:
        assert attempt.wait(SECONDS_OF_A_RUN) == [0] * job.ranks, attempt.report()
        assert attempt.numbers("resumed") == [newest] * bool(newest), attempt.report()
    assert outcome(directory) == {name: value for name, value in truth.items() if name != "kept"}, directory
    # A run that was killed after its last save has nothing more to save, and so nothing more to let go.
    assert listed(directory) == truth["kept"] or (newest == job.n_steps and set(listed(directory)) > set(truth["kept"]))
    return kills


def _check_kill(attempt: Attempt, plan: Plan, newest: int, steps: list[int], seconds: float) -> Kill:
    """What a kill did, if it did no more than it may."""
    job = attempt.job
    reached = max([newest, *(step for rank in range(job.ranks) for step in attempt.numbers("step", rank))])
    is_async = bool(job.checkpoint["async_save"])
    kill = Kill(plan, job.ranks, is_async, reached - max(steps, default=0), seconds)
    told = f"{kill}: {steps} after {newest}\n{attempt.report()}"
    assert -9 in attempt.codes(), f"nobody was killed: {told}"
    assert max(steps, default=0) >= newest, told
    assert kill.lost <= SAVE_EVERY * (1 + is_async), told
    for rank, code in enumerate(attempt.codes()):
        # Who was not killed says by its status that the job failed, unless it had done all its work.
        has_finished = max([newest, *attempt.numbers("step", rank)]) == job.n_steps
        assert code in (-9, 1) or (code == 0 and has_finished), f"rank {rank}: {told}"
    return kill


def _steps_wanted(plan: Plan) -> int:
    """How much of the run must be left for a kill to come: retention acts from the third checkpoint on."""
    if plan.kind == RANDOM:
        return 0
    return 4 * SAVE_EVERY if plan.kind == "in the midst of retention" else 2 * SAVE_EVERY


def _started(job: Job, directory: Path, number: int, plan: Plan, newest: int, rng: random.Random) -> Attempt:
    if plan.kind == RANDOM:
        return Attempt(job, directory, number)
    # Rank 0 alone passes some of the phases; at the others any rank does.
    passes = rng.randrange(job.ranks) if plan.kind in ("after staging", "after the first shard") else 0
    fault = Fault(phase=plan.kind, rank=passes, calls=(rng.choice((1, 2)),), victims=_victims(plan, job.ranks, rng))
    if plan.kind == "in the midst of retention":
        fault = replace(fault, calls=(1,))
    return Attempt(replace(job, fault=fault), directory, number)


def _victims(plan: Plan, ranks: int, rng: random.Random) -> tuple[int, ...]:
    return (rng.randrange(ranks),) if plan.one_rank else tuple(range(ranks))


def _kill_at_random(attempt: Attempt, newest: int, victims: tuple[int, ...], rng: random.Random) -> None:
    """While it starts, or within the time of some step, its validation and save included."""
    left = attempt.job.n_steps - newest
    steps = rng.randint(0, min(8, left))
    is_running = steps == 0 or attempt.wait_for(f"step {newest + steps}")
    time.sleep(rng.uniform(0.0, 0.8 if steps == 0 else 0.15))
    if is_running:
        attempt.send(SIGKILL, victims)


def _end(attempt: Attempt) -> float:
    """Waits until no rank runs; seconds from the first end to the last."""
    deadline = time.monotonic() + SECONDS_OF_A_RUN
    first: float | None = None
    while attempt.is_running():
        if first is None and any(code is not None for code in attempt.codes()):
            first = time.monotonic()
        if time.monotonic() > deadline or (first is not None and time.monotonic() > first + SECONDS_TO_NOTICE):
            raise AssertionError(f"ranks go on though one has ended: {attempt.codes()}\n{attempt.report()}")
        time.sleep(0.002)
    return 0.0 if first is None else time.monotonic() - first
