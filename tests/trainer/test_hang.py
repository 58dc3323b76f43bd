"""A training that hangs ends with every rank's stacks, and goes on under torchrun from its newest checkpoint."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.small import ROOT, Batch, Samples, Sharded, fit, make_config


def torchrun(program: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs `program` on two ranks until all have ended by themselves."""
    (directory / "train.py").write_text(program)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, *options, "train.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


class Hangs(Sharded, dt.CheckpointMixin):
    """Rank 1 falls asleep after its third step, in the first attempt."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 3 and self.world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            self.sleeps()
        return super().training_step(batch, batch_idx)

    def sleeps(self) -> None:
        time.sleep(600)

    def on_load(self, path: Path) -> None:
        Path(f"resumed-{self.world.rank}").write_text(str(self.global_step))


def train() -> None:
    devices = dt.DeviceParameters(device="cpu", hang_timeout_seconds=4.0)
    checkpoint = dt.CheckpointParameters(save_every_n_steps=2, async_save=False)
    config = make_config(max_steps=6, devices=devices, checkpoint=checkpoint)
    fit(Hangs(config, DistributedDataLoader(Samples(24), 2)))


@pytest.mark.slow
@pytest.mark.pitfall(27)
def test_a_hang_is_ended_with_all_stacks_and_torchrun_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    done = torchrun("from tests.trainer.test_hang import train; train()", tmp_path, "--max-restarts=1")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"resumed-{rank}").read_text() for rank in range(2)] == ["2", "2"]
    first, second = ((tmp_path / f"runs/tests/trainer/run/stacks/rank_0000{rank}.txt").read_text() for rank in range(2))
    assert "in sleeps" in second
    assert "in sleeps" not in first
    assert "in training_step" in first
    assert "made no progress for 4 s (training, step 3" in done.stderr
    assert done.stderr.count("failed, the job ends") == 1
    assert re.search(r"^rank 1 at \S+test_hang.py:\d+ `time.sleep\(600\)`$", done.stderr, re.MULTILINE)
    assert re.search(r"^rank 0 at \S+\.py:\d+ `.+`$", done.stderr, re.MULTILINE)
