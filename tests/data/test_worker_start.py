"""A signal to the whole job that finds a worker just begun leaves it alive while the job saves."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.small import make_config
from tests.worlds import run_world


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3) * index


def ours() -> Any:
    return DistributedDataLoader(Rows(), 2, num_workers=2, multiprocessing_context="fork")


def foreign() -> Any:
    return DataLoader(
        Rows(), 2, sampler=WeightedRandomSampler([1.0] * 8, 8), num_workers=2, multiprocessing_context="fork"
    )


class Trained(dt.BaseTrainer, dt.SetupMixin):
    make: Callable[[], Any]

    def configure_models(self) -> None:
        self.model = torch.nn.Linear(3, 1)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def configure_dataloaders(self) -> Any:
        return type(self).make(), None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        self.backward(self.model(batch).mean())
        self.step(self.model, self.optimizer)
        return {}


def train(directory: str) -> list[int]:
    """A signal comes to each worker when it has just been forked, and has no handler of its own yet."""
    os.chdir(directory)
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    steps = []
    for make in (ours, foreign):
        kind = type("Trained", (Trained,), {"make": staticmethod(make)})
        with kind(make_config(max_steps=4)) as trainer:
            trainer.fit()
            steps.append(trainer.global_step)
    return steps


def test_a_worker_that_was_just_forked_outlives_a_signal_to_the_whole_job(tmp_path: Path) -> None:
    assert run_world(train, 1, str(tmp_path)) == [[4, 4]]
