"""Sizes that ranks which share layers cannot have equal parts of are refused by name, before PyTorch joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.api import (
    ConfigError,
    DistributedDataLoader,
    EqualParts,
    RanksDifferError,
    World,
    _fingerprint,
    shard_by_blocks,
)
from tests.trainer import test_tensor_parallel as tensor_parallel
from tests.trainer.arithmetic import LENGTH, Case
from tests.trainer.small import run_ranks
from tests.worlds import run_world

HEAD = 4


class Attention(nn.Module):
    """Counts its heads from the tensor, which may have a half of one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, heads * HEAD), nn.Linear(heads * HEAD, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query(x).view(*x.shape[:2], -1, HEAD)
        return self.out(heads.flatten(2))


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
            "model.down is given parts of unequal sizes on the tensor_parallel=2 ranks: [2, 6, 3], "
        )
        assert "[2, 6, 2]. A plan cuts into equal parts" in message
        assert "that are multiples of 2. Of parameters, model.up.weight has 5 in dimension 0, model.up.bias" in message
        _, message, _ = told["length"]
        assert message.startswith(
            "model is given parts of unequal sizes on the tensor_parallel=2 ranks: [2, 4, 8], [2, 3"
        )
        assert "Of parameters" not in message
        kind, _, (note,) = told["heads"]
        assert kind is RuntimeError
        assert (
            "Under tensor_parallel=2 each rank has a part of model.attention.query, which ran last: weight (6 of 12 in"
            in note
        )
        assert "Parts have to be whole heads, of a number that 2 divides" in note


class OddLengths(tensor_parallel.Trained):
    """Gives its second batch an odd length, which sequence parallelism cannot cut in two."""

    def configure_dataloaders(self) -> tuple[Any, None]:
        loader, _ = super().configure_dataloaders()
        return DistributedDataLoader(loader.dataset, loader.batch_size, collate_fn=Collate()), None


class Collate:
    """Batches of two lengths in turn."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        self.count += 1
        length = LENGTH - (self.count == 2)
        x, y = zip(*samples, strict=True)
        return torch.stack(x)[:, :length], torch.stack(y)[:, :length]


def train_odd_lengths() -> None:
    OddLengths(tensor_parallel.config_of(tensor_parallel.Cell(2, "sequence", Case()))).fit()


def test_a_sequence_that_cannot_be_cut_ends_the_run_by_name(tmp_path: Path) -> None:
    code = "from tests.trainer.test_tensor_mistakes import train_odd_lengths; train_odd_lengths()"
    ranks = run_ranks(code, 2, tmp_path)
    assert [status for status, _ in ranks] == [1, 1]
    assert any("is given parts of unequal sizes on the tensor_parallel=2 ranks: [" in text for _, text in ranks)


def test_parameters_of_several_dtypes_in_a_group_are_named() -> None:
    model = Layers()
    model.attention.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    with pytest.raises(
        ConfigError, match=r"norm.weight of torch.float32 and attention.phase of torch.complex64 would be sharded"
    ):
        shard_by_blocks(model, [], {}, {})


def test_gradients_of_complex_parameters_are_compared() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    parameter.grad = torch.tensor([3, 4j, 0, 0], dtype=torch.complex64)
    norm, *sums = _fingerprint(parameter).tolist()
    assert norm == 5
    assert [abs(number) for number in sums] == [3, 0, 0, 4, 0, 0, 0, 0]
