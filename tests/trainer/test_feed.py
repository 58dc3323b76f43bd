"""Ranks whose loaders end at different times train what all of them have, and nobody hangs."""

import os
from typing import Any

import pytest
import torch

from tests.api import PerRankLoader
from tests.trainer.small import WIDTH, Spread, fit, make_config
from tests.worlds import run_world


class Unsized:
    """Yields one sample per batch and does not know how many."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return (torch.full((1, WIDTH), float(i), dtype=torch.float64) for i in range(self.n))


class Uneven(Spread):
    window: tuple[float, ...] = ()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        self.backward(self.model(batch).mean())
        self.window += (batch[0, 0].item(),)
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer)
            self.seen.append([*self.window])
            self.window = ()
        return {}


def train(lengths: tuple[int, ...], accumulation: int) -> dict[str, Any]:
    data = PerRankLoader(Unsized(lengths[int(os.environ["RANK"])]))
    trainer = fit(Uneven(make_config(n_epochs=2, gradient_accumulation_steps=accumulation), data))
    return {"windows": trainer.seen, "steps": trainer.global_step, "samples": trainer.samples_seen}


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
