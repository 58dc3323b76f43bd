"""Ranks whose loaders end at different times train what all of them have, and nobody hangs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from dream_trainer.data.loader import PerRankLoader
from tests.worlds import run_world


@dataclass
class Config(dt.BaseTrainerConfig, dt.SetupConfigMixin):
    lengths: tuple[int, ...] = ()


class Unsized:
    """Yields one sample per batch and does not know how many."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return (torch.full((1, 2), float(i)) for i in range(self.n))


class Uneven(dt.BaseTrainer, dt.SetupMixin):
    config: Config

    def configure_models(self) -> None:
        self.model = nn.Linear(2, 1)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.windows: list[list[float]] = [[]]

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return PerRankLoader(Unsized(self.config.lengths[self.world.rank])), None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        loss = self.model(batch).mean()
        self.backward(loss)
        self.windows[-1].append(batch[0, 0].item())
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer)
            self.windows.append([])
        return {}


def train(lengths: tuple[int, ...], accumulation: int) -> dict[str, Any]:
    config = Config(
        project="p",
        group="g",
        experiment="e",
        lengths=lengths,
        device_parameters=dt.DeviceParameters(device="cpu"),
        training_parameters=dt.TrainingParameters(n_epochs=2, gradient_accumulation_steps=accumulation),
    )
    with Uneven(config) as trainer:
        trainer.fit()
        return {"windows": trainer.windows[:-1], "steps": trainer.global_step, "samples": trainer.samples_seen}


def train_all(cases: list[tuple[tuple[int, ...], int]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


@pytest.mark.pitfall(13)
@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_loaders_train_what_every_rank_has_and_end_together(world_size: int) -> None:
    lengths = {2: [(7, 10), (1, 5), (3, 3), (4, 9)], 4: [(7, 10, 11, 16), (1, 5, 5, 5)]}[world_size]
    cases = [(item, accumulation) for item in lengths for accumulation in (1, 3)]
    results = run_world(train_all, world_size, cases)
    for number, (item, accumulation) in enumerate(cases):
        common = min(item)
        one_pass = [
            [float(i) for i in range(start, min(start + accumulation, common))]
            for start in range(0, common, accumulation)
        ]
        for rank in results:
            assert rank[number]["windows"] == one_pass * 2, item
            assert rank[number]["steps"] == 2 * len(one_pass)
            assert rank[number]["samples"] == 2 * common * world_size
