"""SIGTERM to a whole process group, as schedulers send it, while workers of somebody else's loader load."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer.small import ROOT
from tests.worlds import free_port, rank_environment

JOB = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
import dream_trainer as dt
from dream_trainer.data import PerRankLoader


class Slow(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(3)


class OwnLoader(DataLoader):
    pass


def stateful(data, size, **workers):
    from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader(data, size, sampler=WeightedRandomSampler([1.0] * 10_000, 10_000), **workers)


class Job(dt.BaseTrainer, dt.SetupMixin, dt.CheckpointMixin):
    def configure_models(self):
        self.model = torch.nn.Linear(3, 1)

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def configure_dataloaders(self):
        kind, persistent = sys.argv[1].split("-")
        make = {"own": OwnLoader, "stateful": stateful}[kind]
        loader = make(Slow(), 2, num_workers=2, persistent_workers=persistent == "persistent")
        return PerRankLoader(loader) if self.world.world_size > 1 else loader, None

    def training_step(self, batch, batch_idx):
        self.backward(self.model(batch).mean())
        self.step(self.model, self.optimizer)
        if self.global_step == 2 and self.world.is_main:
            open("started", "w").close()
        return {}


from dataclasses import dataclass
@dataclass
class Config(dt.BaseTrainerConfig, dt.SetupConfigMixin, dt.CheckpointConfigMixin):
    pass


config = Config(
    project="p", group="g", experiment="e", device_parameters=dt.DeviceParameters(device="cpu"),
    training_parameters=dt.TrainingParameters(max_steps=5000),
)
with Job(config) as trainer:
    trainer.fit()
"""


@pytest.mark.pitfall(82)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("stateful-plain", 1), pytest.param("stateful-persistent", 1, marks=pytest.mark.slow), ("own-plain", 2)],
)
def test_a_signal_to_the_group_saves_though_workers_get_it_too(kind: str, ranks: int, tmp_path: Path) -> None:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, kind],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | rank_environment(rank, ranks, port),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
        texts = [process.communicate(timeout=40)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [143] * ranks, texts
    assert "killed by signal" not in "".join(texts)
    assert list(tmp_path.glob("runs/p/g/e/checkpoints/step_*/manifest.json")), texts
