"""Sizes that ranks which share layers cannot have equal parts of are refused by name, before PyTorch joins them."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.api import ConfigError, EqualParts, RanksDifferError, World, shard_by_blocks
from tests.worlds import run_world

HEAD = 4


class Attention(nn.Module):
    """Counts its heads from the tensor, which may have a half of one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, heads * HEAD), nn.Linear(heads * HEAD, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.query(x).view(*x.shape[:2], -1, HEAD).flatten(2))


class Layers(nn.Module):
    def __init__(self, hidden: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention(8, heads)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.up(self.norm(x)))


def split(model: Layers, world: World) -> Layers:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    assert world.mesh is not None
    plan = {"attention.query": ColwiseParallel(), "attention.out": RowwiseParallel()}
    return parallelize_module(model, world.mesh["tp"], plan | {"up": ColwiseParallel(), "down": RowwiseParallel()})


def make_mistakes() -> dict[str, Any]:
    world = World(dt.DeviceParameters(device="cpu", tensor_parallel=2), shard_by_default=False)
    told: dict[str, Any] = {}
    whole = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    for name, model, x in [
        ("fits", Layers(), whole),
        ("hidden", Layers(hidden=5), whole),
        ("heads", Layers(heads=3), whole),
        ("length", Layers(), whole[:, : 4 - world.rank]),
    ]:
        model = split(model, world)
        try:
            with EqualParts({"model": model}, world).compared():
                model(x)
        except (RanksDifferError, RuntimeError) as error:
            told[name] = (type(error), str(error), error.__notes__ if isinstance(error, RuntimeError) else [])
        assert not any(module._forward_pre_hooks for module in (model, model.attention)), name
    world.close()
    return told


def test_parts_that_are_not_equal_are_refused_on_all_ranks_with_what_fits() -> None:
    for told in run_world(make_mistakes, 2):
        assert told.keys() == {"hidden", "heads", "length"}
        kind, message, _ = told["hidden"]
        assert kind is RanksDifferError
        assert message.startswith(
            "model.down is given parts of unequal sizes on the tensor_parallel=2 ranks: [[2, 6, 3]], "
        )
        assert "[[2, 6, 2]]. A plan cuts into equal parts" in message
        assert "that are multiples of 2." in message
        _, message, _ = told["length"]
        assert message.startswith(
            "model is given parts of unequal sizes on the tensor_parallel=2 ranks: [[2, 4, 8]], [[2, 3"
        )
        kind, _, (note,) = told["heads"]
        assert kind is RuntimeError
        assert "Under tensor_parallel=2 each rank has a part of model.attention.query, which ran last." in note
        assert "Parts have to be whole heads, of a number that 2 divides" in note


def of_two_dtypes() -> nn.Module:
    model = Layers()
    model.attention.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    return model


def test_weights_that_no_block_can_hold_are_refused_by_their_names() -> None:
    with pytest.raises(ConfigError, match="norm.weight of torch.float32 and attention.phase of torch.comp"):
        shard_by_blocks(of_two_dtypes(), [], {}, {}, lambda _: False)
