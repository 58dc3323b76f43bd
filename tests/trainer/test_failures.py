"""What a user sees when something is wrong at several ranks: the cause, the fix, a non-zero exit, in seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer import mixtures, sequences, stages
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import ROOT, Alone, Batch, Samples, Sharded, Spread, batches, fit, make_config, run_ranks


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
            Path("left").touch()
            raise KeyError("the cause")
        super().configure_optimizers()


class StepsTooEarly(Sharded):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(self.model(batch[0]).mean())
        self.step(self.model, self.optimizer)
        return {}


def loader(length: int = 24) -> DistributedDataLoader:
    return DistributedDataLoader(Samples(length), 2)


def shards(count: int) -> dt.DeviceParameters:
    return dt.DeviceParameters(device="cpu", dp_shard=count)


def trainer_for(case: str) -> Any:
    """The trainer of one mistake."""
    match case:
        case "raises":
            return Raises(make_config(n_epochs=1), loader())
        case "told while computing":
            return ToldWhileComputing(make_config(n_epochs=1), loader())
        case "raises in setup":
            return RaisesInSetup(make_config(n_epochs=1), loader())
        case "mesh":
            return Sharded(make_config(n_epochs=1, devices=shards(3)), loader())
        case "shards without FSDPMixin":
            return Spread(make_config(n_epochs=1, devices=shards(2)), loader())
        case "alone":
            return Alone(make_config(n_epochs=1), batches(4))
        case "early step":
            return StepsTooEarly(make_config(n_epochs=1, gradient_accumulation_steps=2), loader())
    raise ValueError(case)


def fail(case: str, directory: Path) -> list[tuple[int, str]]:
    code = f"from tests.trainer.test_failures import trainer_for; trainer_for({case!r}).fit()"
    return run_ranks(code, 2, directory)


MISTAKES = {
    "mesh": ["dp_shard=3", "world_size=2", "1 or 2"],
    "alone": ["Add SetupMixin", "2 ranks"],
    "shards without FSDPMixin": ["FSDPMixin"],
    "early step": ["is_accumulating_gradients"],
}
ORDINARY = ("mesh", "early step")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in ORDINARY else pytest.mark.slow) for case in MISTAKES]
)
def test_a_mistake_ends_all_ranks_with_an_error_that_names_the_fix(case: str, tmp_path: Path) -> None:
    began = time.monotonic()
    ranks = fail(case, tmp_path)
    assert time.monotonic() - began < 30
    text = "".join(error for _, error in ranks)
    assert [status for status, _ in ranks] == [1, 1], text
    assert all(word in text for word in MISTAKES[case]), text
    assert "Traceback" in text


@pytest.mark.pitfall(13)
@pytest.mark.pitfall(61)
def test_a_rank_that_raises_ends_the_job_within_15_seconds_and_its_traceback_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from tests.trainer.test_failures import trainer_for\n"
        "trainer = trainer_for('raises')\nopen('started', 'w').close()\ntrainer.fit()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        started = time.monotonic()
        while not (tmp_path / "started").exists() and time.monotonic() - started < 60:
            time.sleep(0.05)
        began = time.monotonic()
        text = process.communicate(timeout=60)[1]
        assert time.monotonic() - began < 15
    finally:
        process.kill()
        process.communicate()
    assert process.returncode != 0
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
def test_a_rank_that_raises_in_setup_ends_the_other_too(tmp_path: Path) -> None:
    ranks = fail("raises in setup", tmp_path)
    assert outlived(tmp_path) < 15
    assert [status for status, _ in ranks] == [1, 1], ranks
    assert "KeyError: 'the cause'" in ranks[1][1]
    assert "test_failures.py" in ranks[1][1]
    assert "[rank 1] failed" in ranks[1][1]


class Dies(Sharded):
    """A rank is killed in its third step."""

    victim = 1

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.world.rank == self.victim and self.global_step == 2:
            Path("left").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def dies(victim: int) -> None:
    Dies.victim = victim
    Dies(make_config(n_epochs=1), loader()).fit()


@pytest.mark.pitfall(86)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_of_a_rank_that_was_killed_the_others_say_that_it_died(victim: int, tmp_path: Path) -> None:
    ranks = run_ranks(f"from tests.trainer.test_failures import dies; dies({victim})", 2, tmp_path)
    assert outlived(tmp_path) < 15
    status, text = ranks[1 - victim]
    assert status == 1
    assert f"[rank {1 - victim}] stops because of rank {victim}" in text
    assert f"[rank {1 - victim}] failed" not in text
    assert "Traceback" not in text
    if victim == 1:  # rank 0 hosts the store that would tell of it
        assert text.startswith("[rank 1] died, the job ends: process ")


class RaisesWhileRaising(Raises):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.world.rank == 1 and self.global_step == 2:
            Path("left").touch()
        return super().training_step(batch, batch_idx)

    def on_exception(self, exc: BaseException) -> None:
        raise RuntimeError("the listener's own mistake")


def leaves_after_fit() -> None:
    trainer = Sharded(make_config(n_epochs=1), loader())
    trainer.fit()
    if trainer.world.rank == 1:
        Path("left").touch()
        sys.exit(4)
    trainer.world.all_gather_object("is anybody there?")


def raises_while_raising() -> None:
    RaisesWhileRaising(make_config(n_epochs=1), loader()).fit()


def outlived(directory: Path) -> float:
    """Seconds from when a rank left until now."""
    return time.time() - (directory / "left").stat().st_mtime


@pytest.mark.pitfall(13)
@pytest.mark.parametrize("case", ["leaves_after_fit", "raises_while_raising"])
def test_however_one_rank_leaves_the_other_ends_within_15_seconds_and_both_say_so_by_their_status(
    case: str, tmp_path: Path
) -> None:
    ranks = run_ranks(f"from tests.trainer.test_failures import {case}; {case}()", 2, tmp_path)
    assert outlived(tmp_path) < 15
    text = "".join(error for _, error in ranks)
    assert [status for status, _ in ranks] == [1, 4 if case == "leaves_after_fit" else 1], text
    if case == "raises_while_raising":
        assert "KeyError: 'the cause'" in text


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


def test_a_signal_handler_of_the_user_is_back_after_fit() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    fit(Alone(make_config(n_epochs=1), batches(2)))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# -- killed on a mesh


STEPS = 4
SAVING = {"save_every_n_epochs": None, "save_every_n_steps": 1, "async_save": False}


class Killed(dt.DreamTrainer):
    """A rank of it dies in the third step of its first start."""

    dies = False

    def post_train_batch(self, result: dict[str, Any], batch_idx: int) -> None:
        if self.dies and self.global_step == 3 and self.world.rank == self.world.world_size // 2:
            os.kill(os.getpid(), SIGKILL)


class Stages(Killed, stages.Trained): ...


class Sequences(Killed, sequences.Trained): ...


class Mixtures(Killed, mixtures.Trained): ...


def trainer_of(mesh: str, experiment: str) -> Killed:
    checkpoints = dt.CheckpointParameters(**SAVING)
    if mesh.startswith("pp 2"):
        case = stages.Case(2, dp=2, shard="auto", dropout=0.3)
        if "memory" in mesh:  # of which the newest checkpoint is that of the first step
            checkpoints = replace(
                checkpoints, save_every_n_steps=20, save_local_every_n_steps=1, local_directory="~/memory"
            )
        config: Any = stages.config_of(case, experiment, max_steps=STEPS)
        return Stages(replace(config, checkpoint_parameters=checkpoints))
    if mesh == "ep 2":
        case = mixtures.Case(2, ep=2, accumulation=2)
        return Mixtures(mixtures.config_of(case, experiment, checkpoints=checkpoints, training={"max_steps": STEPS}))
    case = sequences.Case(2, dp=2, shard="auto", packed=True, dropout=0.3)
    config = sequences.config_of(case, experiment, max_steps=STEPS)
    return Sequences(replace(config, checkpoint_parameters=checkpoints))


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    return mixtures.everything(trainer) if isinstance(trainer, Mixtures) else stages.state_of(trainer)


def divide_hosts() -> None:
    """Says that the first half of the ranks is one host and the second another, each with a home of its own."""
    rank, per_host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2
    host, local_rank = divmod(rank, per_host)
    home = Path(f"host_{host}").absolute()
    home.mkdir(exist_ok=True)
    os.environ |= {"GROUP_RANK": str(host), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(per_host)}
    os.environ["HOME"] = str(home)


def run_to_the_end(mesh: str, experiment: str, *, dies: bool) -> None:
    Killed.dies = dies
    if "memory" in mesh:
        divide_hosts()
    with trainer_of(mesh, experiment) as trainer:
        trainer.fit()
        torch.save(state_of(trainer), f"{experiment}-{trainer.world.rank}.pt")
        if experiment == "killed" and "memory" in mesh:
            sys.stderr.write((trainer.run_dir / "run.json").read_text())


MESHES = [("pp 2 x dp 2", 4), ("cp 2 x dp 2", 4), ("ep 2", 2), ("pp 2 x dp 2, memory", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "n_ranks"), MESHES)
def test_a_run_that_was_killed_and_started_again_ends_as_one_that_was_not(
    mesh: str, n_ranks: int, tmp_path: Path
) -> None:
    said: list[str] = []

    def statuses(experiment: str, *, dies: bool) -> list[int]:
        code = "from tests.trainer.test_failures import run_to_the_end; "
        code += f"run_to_the_end({mesh!r}, {experiment!r}, dies={dies})"
        ranks = run_ranks(code, n_ranks, tmp_path, timeout=240)
        said[:] = [error for _, error in ranks]
        return [status for status, _ in ranks]

    assert statuses("straight", dies=False) == [0] * n_ranks
    assert -SIGKILL in statuses("killed", dies=True)
    hosts = ["ranks_0-1", "ranks_2-3"]  # a stage each
    assert sorted(path.name for path in tmp_path.glob("host_*/memory/*/*/*")) == hosts * ("memory" in mesh)
    assert statuses("killed", dies=False) == [0] * n_ranks, said
    if "memory" in mesh:  # and not from the run's only checkpoint, of the first step
        assert all("host_0/memory/" in error and "step_00000001" not in error for error in said), said
    for rank in range(n_ranks):
        straight, killed = (torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("straight", "killed"))
        assert same_bits(killed, straight)
