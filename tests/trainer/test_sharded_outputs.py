"""What blocks of a large sharded model are given and give, in containers of users' own classes, in half precision."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.small import BY_BLOCKS, Sharded, make_config, weights
from tests.trainer.test_plain_steps import SIZE, WIDTH, data
from tests.worlds import run_world


class Output(dict[str, Tensor]):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self["x"] = x


class Ordered(OrderedDict[str, Tensor]):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self["x"] = x


@dataclass
class Record:
    x: Tensor
    calls: int = field(init=False, default=0)


def packed(x: Tensor) -> PackedSequence:
    return pack_padded_sequence(x[None], [len(x)], batch_first=True)


MAKE: dict[str, Any] = {"tensor": lambda x: x, "dict": Output, "ordered": Ordered, "record": Record, "packed": packed}


def tensor_in(value: Any) -> Tensor:
    if isinstance(value, dict):
        return value["x"]
    if isinstance(value, Record):
        return value.x
    return value.data if isinstance(value, PackedSequence) else value


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        return MAKE[self.kind](self.linear(tensor_in(given)).tanh())


class Trains(Sharded):
    given: Any = None

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = self.model(batch[0].float())
        self.given = type(output).__name__, tensor_in(output).dtype
        return tensor_in(output).square().mean()


def train_all() -> list[tuple[str, torch.dtype, dict[str, Tensor]]]:
    found = []
    for kind in MAKE:
        devices = dt.DeviceParameters(device="cpu", dp_shard=2, precision="bf16")
        config = make_config(devices=devices, fsdp=BY_BLOCKS, n_epochs=1)
        with Trains(config, DistributedDataLoader(data(), SIZE)) as trainer:
            trainer.make_model = lambda kind=kind: nn.Sequential(Block(kind), Block(kind))
            trainer.fit()
            found.append((*trainer.given, weights(trainer.model)))
    return found


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11 casts within a hook that cannot be overridden")
@pytest.mark.pitfall(104)
def test_containers_keep_their_class_and_what_they_hold_is_cast() -> None:
    names = ["Tensor", "Output", "Ordered", "Record", "PackedSequence"]
    for rank in run_world(train_all, 2):
        for (name, dtype, trained), expected in zip(rank, names, strict=True):
            assert name == expected
            assert dtype == torch.float32
            assert all(map(torch.equal, trained.values(), rank[0][2].values()))
