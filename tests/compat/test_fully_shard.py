"""Groups of `fully_shard` inside of blocks that selective checkpointing runs again."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dream_trainer.compat.fully_shard import watch_gradients
from dream_trainer.compat.local_gradients import LocalGradients
from dream_trainer.modules.recompute import recompute
from dream_trainer.modules.sharding import fsdp_modules
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
    sharded, local_gradients = copy.deepcopy(plain), LocalGradients()
    for block in sharded:
        recompute(block, keep=("aten.addmm.default",))
        fully_shard(block.inner, reshard_after_forward=False)
        fully_shard(block, reshard_after_forward=False)
    fully_shard(sharded, reshard_after_forward=False)
    for module in fsdp_modules(sharded):
        watch_gradients(module, local_gradients)
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


def test_groups_inside_of_what_is_run_again_may_be_gathered_in_one_run_and_not_in_the_other() -> None:
    assert all(max(errors) < 1e-12 for errors in run_world(backwards_after_all_forwards, 2))
