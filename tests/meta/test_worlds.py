"""Initial weights are the same bits on every world size and mesh."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.api import InitError, materialize
from tests.trainer.arithmetic import full
from tests.worlds import gloo_group, run_world

from .building import deferred, planned, tensors
from .families import FAMILIES, NanoGPT

SHARDABLE = [
    "nano_gpt",
    "embedding",
    "conv",
    "batch_norm",
    "lstm",
    "attention",
    "encoder",
    "every_init",
    "orthogonal",
    "late",
    "flat",
]
LAYOUTS = {3: [(3,)], 4: [(4,), (4, 1), (2, 2)]}


def _built(family: str, shape: tuple[int, ...]) -> nn.Module:
    model, plan = planned(FAMILIES[family])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    if isinstance(model, NanoGPT):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize({"model": model}, plan, "cpu")
    return model


def _differing(family: str, model: nn.Module) -> list[str]:
    """Names of tensors that are not those of one process."""
    expected, found = tensors(deferred(FAMILIES[family])), tensors(model)
    assert list(found) == list(expected)
    return [name for name, value in expected.items() if not torch.equal(full(found[name]), value)]


@gloo_group()
def _compare() -> list[str]:
    layouts = [(family, shape) for shape in LAYOUTS[dist.get_world_size()] for family in SHARDABLE]
    return [f"{family} {shape} {n}" for family, shape in layouts for n in _differing(family, _built(family, shape))]


@pytest.mark.pitfall(21)
@pytest.mark.parametrize("world_size", [3, 4])
def test_every_mesh_gets_the_bits_of_one_process(world_size: int) -> None:
    assert run_world(_compare, world_size) == [[]] * world_size


@gloo_group()
def _tensor_parallel() -> list[str]:
    model, plan = planned(NanoGPT)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "proj": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    materialize({"model": model}, plan, "cpu")
    return _differing("nano_gpt", model)


@pytest.mark.pitfall(21)
def test_tensor_parallel_and_sharded_gets_the_same_bits() -> None:
    assert run_world(_tensor_parallel, 4) == [[]] * 4


class _Forgot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2))
        with torch.no_grad():
            self.weight[:2] = 1.0  # rank 0's half


class _Lists(nn.Linear):
    """Computes with a list that goes on holding the whole parameter when it is sharded."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.weight = nn.Parameter(torch.zeros(2, 4))  # small and computed: never on meta, unlike the bias
        self.both = {"kernels": [self.weight], "rest": self.bias}


@gloo_group()
def _mistaken(make: Callable[[], nn.Module]) -> str:
    model, plan = planned(make)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        materialize({"model": model}, plan, "cpu")
    except InitError as error:
        return str(error)
    return "no error"


def test_every_rank_names_the_same_uninitialised_parameter() -> None:
    one, two = run_world(_mistaken, 2, _Forgot)
    assert one == two
    assert "model.weight" in one


def test_a_sharded_parameter_that_an_attribute_holds_too_is_named() -> None:
    one, two = run_world(_mistaken, 2, _Lists)
    assert one == two
    assert "model.both['kernels'][0]" in one
    assert "model.weight" in one
    model = deferred(_Lists)  # whole parameters stay the same objects
    assert model.both["kernels"][0] is model.weight
    assert model.both["rest"] is model.bias
