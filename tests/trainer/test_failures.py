"""What a user sees when something is wrong at several ranks: the cause, the fix, a non-zero exit, in seconds."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.small import Alone, Batch, Samples, Sharded, Spread, batches, make_config, run_ranks
from tests.trainer.test_hang import torchrun


class Raises(Sharded):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.world.rank == 1 and self.global_step == 2:
            raise KeyError("the cause")
        return super().training_step(batch, batch_idx)


class ToldWhileComputing(Raises):
    """torchrun tells rank 0 to stop while that computes: no collective has shown it that rank 1 is gone."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.world.rank == 0 and self.global_step == 2:
            for _ in range(100):
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class RaisesInSetup(Sharded):
    def configure_optimizers(self) -> None:
        if self.world.rank == 1:
            raise KeyError("the cause")
        super().configure_optimizers()


class RaisesWhileRaising(Raises):
    def on_exception(self, exc: BaseException) -> None:
        raise RuntimeError("the listener's own mistake")


class Dies(Sharded):
    """A rank is killed in its third step."""

    victim = 1

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.world.rank == self.victim and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class FirstDies(Dies):
    victim = 0


def loader() -> DistributedDataLoader:
    return DistributedDataLoader(Samples(24), 2)


def shards(count: int) -> dt.DeviceParameters:
    return dt.DeviceParameters(device="cpu", dp_shard=count)


TRAINERS: dict[str, Callable[[], Any]] = {
    "raises": lambda: Raises(make_config(n_epochs=1), loader()),
    "told while computing": lambda: ToldWhileComputing(make_config(n_epochs=1), loader()),
    "raises in setup": lambda: RaisesInSetup(make_config(n_epochs=1), loader()),
    "raises while raising": lambda: RaisesWhileRaising(make_config(n_epochs=1), loader()),
    "0 dies": lambda: FirstDies(make_config(n_epochs=1), loader()),
    "1 dies": lambda: Dies(make_config(n_epochs=1), loader()),
    "mesh": lambda: Sharded(make_config(n_epochs=1, devices=shards(3)), loader()),
    "shards without FSDPMixin": lambda: Spread(make_config(n_epochs=1, devices=shards(2)), loader()),
    "alone": lambda: Alone(make_config(n_epochs=1), batches(4)),
}


def fail(case: str, directory: Path) -> list[tuple[int, str]]:
    code = f"from tests.trainer.test_failures import TRAINERS; TRAINERS[{case!r}]().fit()"
    return run_ranks(code, 2, directory)


MISTAKES = {
    "mesh": ["dp_shard=3", "world_size=2", "1 or 2"],
    "alone": ["Add SetupMixin", "2 ranks"],
    "shards without FSDPMixin": ["FSDPMixin"],
}
ORDINARY = ("mesh", "alone")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in ORDINARY else pytest.mark.slow) for case in MISTAKES]
)
def test_a_mistake_ends_all_ranks_with_an_error_that_names_the_fix(case: str, tmp_path: Path) -> None:
    ranks = fail(case, tmp_path)
    text = "".join(error for _, error in ranks)
    assert [status for status, _ in ranks] == [1, 1], text
    assert all(word in text for word in MISTAKES[case]), text
    assert "Traceback" in text


@pytest.mark.pitfall(13)
@pytest.mark.pitfall(61)
def test_a_rank_that_raises_ends_the_job_and_its_traceback_is_shown(tmp_path: Path) -> None:
    done = torchrun("from tests.trainer.test_failures import TRAINERS; TRAINERS['raises']().fit()", tmp_path)
    assert done.returncode != 0
    text = done.stderr
    lines = text.splitlines()
    # One screen: the rank, the message, the place, the calls in the user's files, once.
    begin = lines.index("[rank 1] failed, the job ends:")
    assert lines[begin + 1] == "KeyError: 'the cause'"
    assert lines[begin + 2].startswith("  in training_step, ")
    assert "test_failures.py:" in lines[begin + 2]
    assert "dream_trainer/trainer" not in text
    assert text.count('raise KeyError("the cause")') == 2
    assert "[rank 0] stops because of rank 1." in lines, text
    cause = text[text.index("Root Cause") :]
    assert "rank      : 1" in cause
    assert "SeeAbove: KeyError: 'the cause'" in cause


@pytest.mark.pitfall(13)
def test_a_rank_that_is_told_to_stop_says_which_one_failed(tmp_path: Path) -> None:
    ranks = fail("told while computing", tmp_path)
    assert [status for status, _ in ranks] == [1, 1], ranks
    assert "[rank 1] failed, the job ends:" in ranks[1][1]
    assert ranks[0][1].count("[rank 0] stops because of rank 1.\n") == 1, ranks[0][1]


@pytest.mark.pitfall(13)
@pytest.mark.parametrize("case", ["raises in setup", "raises while raising"])
def test_a_rank_that_raises_in_setup_or_while_it_raises_ends_the_other_too(case: str, tmp_path: Path) -> None:
    ranks = fail(case, tmp_path)
    assert [status for status, _ in ranks] == [1, 1], ranks
    assert "KeyError: 'the cause'" in ranks[1][1]
    assert "test_failures.py" in ranks[1][1]
    assert "[rank 1] failed" in ranks[1][1]


@pytest.mark.pitfall(86)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_of_a_rank_that_was_killed_the_others_say_that_it_died(victim: int, tmp_path: Path) -> None:
    ranks = fail(f"{victim} dies", tmp_path)
    status, text = ranks[1 - victim]
    assert status == 1
    assert f"[rank {1 - victim}] stops because of rank {victim}" in text
    assert f"[rank {1 - victim}] failed" not in text
    assert "Traceback" not in text
    if victim == 1:  # rank 0 hosts the store that would tell of it
        assert text.startswith("[rank 1] died, the job ends: process ")


def leaves_after_fit() -> None:
    trainer = Sharded(make_config(n_epochs=1), loader())
    trainer.fit()
    if trainer.world.rank == 1:
        sys.exit(4)
    trainer.world.all_gather_object("is anybody there?")


@pytest.mark.pitfall(13)
@pytest.mark.slow
def test_a_rank_that_leaves_after_fit_ends_the_other_and_both_say_so_by_their_status(tmp_path: Path) -> None:
    ranks = run_ranks("from tests.trainer.test_failures import leaves_after_fit; leaves_after_fit()", 2, tmp_path)
    assert [status for status, _ in ranks] == [1, 4], ranks


CAUGHT = """
import os
from tests.trainer.test_failures import Spread, loader, make_config

def train(breaks):
    try:
        with Spread(make_config(n_epochs=1), loader()) as trainer:
            trainer.fit()
            if breaks:
                raise KeyError("the report's column")
    except KeyError:
        print("caught")

train(breaks=os.environ["RANK"] == "0")
train(breaks=False)
"""


@pytest.mark.pitfall(82)
def test_an_exception_on_one_rank_after_fit_ends_the_job_and_names_the_cause(tmp_path: Path) -> None:
    (code, text), (other, consequence) = run_ranks(CAUGHT, 2, tmp_path)
    assert code == 1
    assert other != 0
    assert "[rank 1] stops because of rank 0." in consequence
    assert "Traceback" not in consequence
    assert "the report's column" in text


class TerminatedLate(Sharded):
    """Rank 1 gets SIGTERM in its last step, whose pulse it has posted."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        if self.world.rank == 1 and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    def on_interrupt(self) -> None:
        Path(f"interrupted-{self.world.rank}").write_text(str(self.global_step))


def terminated_late() -> None:
    trainer = TerminatedLate(make_config(max_steps=3), loader())
    trainer.fit()
    Path(f"went-on-{trainer.world.rank}").touch()


def test_sigterm_to_one_rank_after_its_last_pulse_ends_both_alike(tmp_path: Path) -> None:
    ranks = run_ranks("from tests.trainer.test_failures import terminated_late; terminated_late()", 2, tmp_path)
    assert [status for status, _ in ranks] == [128 + signal.SIGTERM] * 2, ranks
    assert {p.name: p.read_text() for p in tmp_path.iterdir() if p.is_file()} == {
        "interrupted-0": "3",
        "interrupted-1": "3",
    }
