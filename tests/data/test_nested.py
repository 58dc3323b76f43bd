from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.api import to_device

META = torch.device("meta")
CPU = torch.device("cpu")

Pair = namedtuple("Pair", ["image", "label"])


class Encoding(UserDict):
    """Like Hugging Face's BatchEncoding: a UserDict with extras, and a `to` that changes itself."""

    def __init__(self, data: dict[str, Any], encodings: str | None = None) -> None:
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: torch.device) -> "Encoding":
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


@dataclass(frozen=True, slots=True)
class FrozenBatch:
    image: Tensor
    name: str


@dataclass
class BatchWithState:
    image: Tensor
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.image * 2


class Output(OrderedDict):
    """A mapping that checks its own keys when set."""


class Graph:
    """An object that moves itself."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.nodes.to(device))


def is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


@pytest.mark.pitfall(19)
def test_every_container_type_is_moved_and_keeps_its_type() -> None:
    x = torch.ones(3, 2)
    batch = {
        "list": [x, None, "text", 3],
        "tuple": (x, 2.5),
        "pair": Pair(x, x),
        "frozen": FrozenBatch(x, "cat"),
        "state": BatchWithState(x),
        "counts": defaultdict(list, a=x),
        "encoding": Encoding({"ids": x}, encodings="kept"),
        "ordered": Output(a=x),
        "graph": Graph(x),
    }
    moved = to_device(batch | {"proxy": MappingProxyType({"a": x})}, META)
    assert {name: type(moved[name]) for name in batch} == {name: type(value) for name, value in batch.items()}
    tensors = [moved["list"][0], moved["tuple"][0], moved["pair"].label, moved["frozen"].image, moved["state"].doubled]
    tensors += [moved["counts"]["a"], moved["encoding"].ids, moved["ordered"]["a"], moved["proxy"]["a"]]
    assert all(is_meta(tensor) for tensor in [*tensors, moved["graph"].nodes])
    assert moved["list"][1:] == [None, "text", 3]
    assert moved["frozen"].name == "cat"
    assert moved["counts"]["new"] == []
    assert moved["encoding"].encodings == "kept"


@pytest.mark.pitfall(19)
def test_moving_never_changes_the_batch_that_was_given() -> None:
    encoding = Encoding({"ids": torch.ones(2)})
    batch = {"encoding": encoding, "list": [torch.ones(2)], "state": BatchWithState(torch.ones(2))}
    to_device(batch, META)
    assert not is_meta(encoding["ids"])
    assert not is_meta(batch["list"][0])
    assert not is_meta(batch["state"].image)


def test_a_batch_that_is_in_place_already_comes_back_as_the_same_object() -> None:
    x = torch.ones(2)
    for batch in (
        x,
        {"a": [x, (x, 1)]},
        Pair(x, x),
        FrozenBatch(x, "a"),
        Encoding({"a": x}),
        defaultdict(list, a=x),
        3,
        None,
    ):
        assert to_device(batch, CPU) is batch
