"""What `frozen` and the default blocks do to models under `fully_shard`; a world of one process is enough."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.api import ConfigError, frozen, repeated_blocks, shard_by_blocks


def sharded_model() -> nn.Module:
    """One `fully_shard` group in a process group of one rank."""
    return fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.pitfall(58)
def test_frozen_also_holds_for_parameters_that_an_evaluation_left_gathered(group_of_one: None) -> None:
    sharded = sharded_model()
    x = torch.ones(1, 2, requires_grad=True)
    with torch.no_grad():
        sharded(x)  # the root keeps its parameters gathered from here on
    with frozen(sharded):
        sharded(x).sum().backward()
    sharded.reshard()
    assert x.grad is not None
    assert [p.grad for p in sharded.parameters()] == [None] * 4


def test_after_frozen_the_same_parameters_learn_again(group_of_one: None) -> None:
    sharded = sharded_model()
    with frozen(sharded), torch.no_grad():
        sharded(torch.ones(1, 2))  # gathered, and left so
    sharded(torch.ones(1, 2)).sum().backward()
    assert all(p.grad is not None for p in sharded.parameters())


@pytest.mark.pitfall(64)
def test_blocks_are_the_outermost_repeated_children_and_not_the_experts_inside() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))

    model = nn.ModuleDict(
        {
            "encoder": nn.ModuleList(Mixture() for _ in range(2)),
            "decoder": nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))),
            "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        }
    )
    assert repeated_blocks(model) == [*model["encoder"], *model["decoder"]]


def test_a_parameter_tied_across_blocks_is_refused_with_both_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"in block '0' and in block '1'.*model_blocks"):
        shard_by_blocks(model, list(model), {}, {}, lambda _: False)
