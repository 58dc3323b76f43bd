"""Layers that each rank leaves out by its own draws (LayerDrop, stochastic depth), on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

from tests.api import StepError
from tests.trainer.small import (
    BY_BLOCKS,
    Batch,
    Samples as Pairs,
    Sharded,
    Spread,
    assert_same_weights,
    fill,
    make_config,
    sgd,
    weights,
)
from tests.worlds import run_world

DROPPED = {0: (), 1: (2,)}  # by each rank in its second batch


class Dropping(nn.Module):
    """Blocks, of which a rank leaves out some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(3, 1)
        self.dropped: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.dropped:
                x = x + block(x)
        return self.head(x)


class Drops:
    def configure_models(self) -> None:
        self.model = Dropping().double()

    def init_weights(self) -> None:
        fill(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.model.dropped = DROPPED[self.world.rank] if batch_idx == 1 else ()
        x, y, _ = batch
        self.backward(nn.functional.mse_loss(self.model(x), y))
        self.step(self.model, self.optimizer)
        return {}


class Shards(Drops, Sharded):
    pass


class Replicas(Drops, Spread):
    pass


def train(cls: type[Any], by_blocks: bool = False) -> Any:
    data = torch.utils.data.DataLoader(Pairs(16), 2)
    try:
        config = make_config(max_steps=4, fsdp=BY_BLOCKS) if by_blocks else make_config(max_steps=4)
        with cls(config, data) as trainer:
            trainer.fit()
            return weights(trainer.model)
    except StepError as error:
        return str(error)


def by_hand() -> dict[str, torch.Tensor]:
    """One process: a block counts 0 in the mean for the half of a batch that leaves it out."""
    model, data = Dropping().double(), Pairs(16)
    fill(model)
    optimizer = sgd(model)
    for step in range(4):
        for rank, dropped in DROPPED.items():
            model.dropped = dropped if step == 1 else ()
            part = slice(4 * step + 2 * rank, 4 * step + 2 * rank + 2)
            (nn.functional.mse_loss(model(data.x[part]), data.y[part]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("cls", [Replicas, Shards])
def test_a_layer_that_one_rank_leaves_out_counts_zero_there(cls: type[Any]) -> None:
    for found in run_world(train, 2, cls):
        assert_same_weights(found, by_hand())


@pytest.mark.slow
@pytest.mark.xfail(raises=RuntimeError, reason="the ranks wait for each other until the time-out")
def test_a_layer_that_one_rank_leaves_out_of_shards_by_blocks_is_named_before_the_time_out() -> None:
    for found in run_world(train, 2, Shards, True, timeout=40):
        if isinstance(found, str):
            assert "blocks.2" in found
            assert "dp_shard=1" in found
        else:
            assert_same_weights(found, by_hand())
