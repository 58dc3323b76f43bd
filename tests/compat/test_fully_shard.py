"""Groups of `fully_shard` inside of blocks that selective checkpointing runs again."""

import copy

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.api import GradientState, TouchableShards, fsdp_modules, recompute, watch_gradients
from tests.worlds import run_world


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(torch.relu(self.inner(torch.relu(self.before(x)))))


def backwards_after_all_forwards() -> list[float]:
    """As in a pipeline: the first gathers the inner group, others find it gathered, until a backward gives it back."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block()).double()
    sharded, local_gradients = copy.deepcopy(plain), GradientState()
    for block in sharded:
        recompute(block, keep=("aten.addmm.default",))
        fully_shard(block.inner, reshard_after_forward=False)
        fully_shard(block, reshard_after_forward=False)
    fully_shard(sharded, reshard_after_forward=False)
    for module in fsdp_modules(sharded):
        watch_gradients(module, local_gradients, TouchableShards(lambda *_: None))
    for model in (plain, sharded):
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
        for output in reversed([model(x) for x in inputs]):
            output.square().sum().backward()
    errors = []
    for parameter, own in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert isinstance(own.grad, DTensor)
        assert parameter.grad is not None
        errors.append(float((own.grad.full_tensor() - parameter.grad).abs().max()))
    return errors


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, n_layers: int) -> Tensor:
        for layer in self.layers[:n_layers]:
            x = layer(x)
        return x


def a_layer_that_runs_in_the_second_batch_alone() -> list[float]:
    """In half precision, of whole numbers that it has room for."""
    plain, local_gradients = Skips(), GradientState()
    with torch.no_grad():
        for number, parameter in enumerate(plain.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) + number).remainder(3).sub(1).view_as(parameter))
    sharded = copy.deepcopy(plain)
    halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in sharded.layers:
        fully_shard(layer, mp_policy=halves)
    fully_shard(sharded, mp_policy=halves)
    for module in fsdp_modules(sharded):
        watch_gradients(module, local_gradients, TouchableShards(lambda *_: None))
    x = torch.arange(8.0).remainder(5).view(2, 4)
    for n_layers in (1, 2):
        sharded.set_requires_gradient_sync(n_layers == 2)  # type: ignore[operator]
        for model in (plain, sharded):
            model(x, n_layers).sum().backward()
    pairs = list(zip(plain.parameters(), sharded.parameters(), strict=True))
    return [float((own.grad.full_tensor() - p.grad).abs().max()) for p, own in pairs]  # type: ignore[union-attr]


def in_groups() -> tuple[list[float], list[float]]:
    return backwards_after_all_forwards(), a_layer_that_runs_in_the_second_batch_alone()


def test_groups_may_be_gathered_in_one_run_and_not_in_the_other_and_may_run_late() -> None:
    for again, late in run_world(in_groups, 2):
        assert max(again) < 1e-12
        assert max(late) == 0
