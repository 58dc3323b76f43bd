"""Where a run's time went: the parts add up to its whole time, over kills too, and say what was trained twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import PerRankLoader, Start, receipt
from tests.trainer.small import BY_BLOCKS, Batch, Built, batches, run_config
from tests.worlds import run_world

SCRIPT = """
import os, signal, sys, torch
import dream_trainer as dt, dream_trainer.trainer.run_record as kept
kept.WORTH_TELLING = 0.0
class Trainer(dt.DreamTrainer):
    def configure_models(self):
        self.model = torch.nn.Linear(4, 1)

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self):
        rows = [torch.randn(4) for _ in range(64)]
        return torch.utils.data.DataLoader(rows, batch_size=4), torch.utils.data.DataLoader(rows[:8], batch_size=4)

    def training_step(self, batch, batch_idx):
        loss = self.model(batch).square().mean()
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        return {"loss": self.model(batch).square().mean()}

    def post_train_step(self):
        if self.global_step == int(sys.argv[1]):
            self.save_checkpoint()
        if self.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

config = dt.DreamTrainerConfig(
    experiment="killed",
    device_parameters=dt.DeviceParameters(device="cpu"),
    training_parameters=dt.TrainingParameters(max_steps=30, val_every_n_steps=10),
    checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None),
    logger_parameters=dt.LoggerParameters(loggers=("console", "jsonl"), log_every_n_steps=1),
)
with Trainer(config) as trainer:
    trainer.fit()
"""


def start(directory: Path, saves_at: int, killed_at: int) -> tuple[float, str]:
    """Runs the script and returns when it was started, and what it printed."""
    now = time.time()
    command = [sys.executable, "-c", SCRIPT, str(saves_at), str(killed_at)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env={**os.environ, "RANK": "0"})
    assert done.returncode == (-signal.SIGKILL if killed_at else 0), done.stderr
    return now, done.stdout


def test_a_run_that_was_killed_twice_accounts_for_all_of_its_time(tmp_path: Path) -> None:
    begins, printed = zip(start(tmp_path, 6, 13), start(tmp_path, 15, 18), start(tmp_path, 0, 0), strict=True)
    ended = time.time()
    (record,) = tmp_path.glob("runs/*/*/killed/run.json")
    times = json.loads(record.read_text())["times"]
    starts = [Start.of(plain) for plain in times]
    assert [one.first_step for one in starts] == [0, 6, 15]
    assert starts[-1].last_step == 30
    assert all(one.first_step < one.last_step < killed for one, killed in zip(starts, (14, 19), strict=False))
    for one, begun, following in zip(starts, begins, [*begins[1:], ended], strict=True):
        assert begun - 0.1 <= one.began <= one.trained_from <= one.seen <= following + 0.1
    told = receipt(times)
    assert told is not None
    assert told.starts == 3
    assert told.total == pytest.approx(starts[-1].seen - starts[0].began, abs=1e-6)
    assert all(told.seconds[name] > 0 for name in ("training", "again", "validation", "saving", "starting", "idle"))
    shown = subprocess.run(
        [sys.executable, "-m", "dream_trainer", "runs", "show", str(record.parent)], capture_output=True, text=True
    )
    assert f"goodput {told.goodput:.1%}" in shown.stdout
    assert "steps done twice" in shown.stdout
    assert ["goodput" in text for text in printed] == [False, False, True]
    assert printed[-1].splitlines()[-1] == told.words()


def test_the_parts_follow_from_what_each_start_wrote() -> None:
    # 10 s to start, 100 s of training to step 50 (20 s of it validations), a checkpoint of step 30 after 60 s; killed.
    first = Start(
        began=0, trained_from=10, seen=110, first_step=0, last_step=50, validation=20, saved=[[10, 30], [30, 70]]
    )
    second = Start(began=130, trained_from=135, seen=195, first_step=30, last_step=60, data=6, saving=3, ranks=1)
    told = receipt([vars(first), vars(second)])
    assert told is not None
    # 40 of the first start's 100 s were done again: 60% of each of its parts stays.
    expected = {"again": 40.0, "validation": 12.0, "training": 48.0 + 50.0, "data": 6.0, "saving": 3.0, "ranks": 1.0}
    assert told.seconds == pytest.approx(expected | {"starting": 15.0, "idle": 20.0})
    assert told.total == pytest.approx(195)
    assert told.goodput == pytest.approx(98 / 195)
    assert "goodput 50.3%" in told.words()
    assert "steps done twice 21%" in told.words()


def test_a_start_that_resumed_what_it_ended_with_did_nothing_twice() -> None:
    first = Start(began=0, trained_from=1, seen=5, first_step=0, last_step=10)
    second = Start(began=6, trained_from=7, seen=9, first_step=10, last_step=20)
    told = receipt([vars(first), vars(second)])
    assert told is not None
    assert told.seconds["again"] == 0
    assert told.seconds["training"] == pytest.approx(6)
    assert receipt([]) is None


class Waits(Built, dt.DreamTrainer):
    """Rank 1 sleeps between two blocks."""

    def loss_of(self, batch: Batch) -> Tensor:
        first, *others = self.model[0]
        hidden = first(batch[0])
        time.sleep(0.1 * self.world.rank)
        for block in others:
            hidden = block(hidden)
        return mse_loss(self.model[1](hidden), batch[1])


def seconds_waited() -> float:
    devices = dt.DeviceParameters(device="cpu", dp_shard=2)
    config = run_config(device_parameters=devices, fsdp_parameters=BY_BLOCKS)
    with Waits(config, PerRankLoader(batches(8))) as trainer:
        trainer.fit()
        return trainer._runtime.parallel.gradients.own_time.waited


def test_a_rank_waits_for_a_slow_one_in_gathers_of_weights() -> None:
    of_main, _ = run_world(seconds_waited, 2)
    assert of_main > 0.5  # 8 batches, of 0.1 s each
