"""Blocks with a budget keep no more than it allows and compute no more again than that takes; numbers are the same."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dream_trainer.compat.operations import EXPENSIVE_OPERATIONS
from dream_trainer.errors import ConfigError
from dream_trainer.modules.activation_budget import Budget, KeptBytes, keep_within
from dream_trainer.modules.mixture_of_experts import MoE

WIDTH, N_BLOCKS = 16, 10


class Block(nn.Module):
    """With everything that a forward run once more could move: random numbers, statistics, counts of tokens."""

    def __init__(self, has_norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if has_norm else nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.down(F.dropout(F.silu(self.up(self.norm(x))).tanh(), 0.3, self.training))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(N_BLOCKS))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=scale)
        return x


class Live(TorchDispatchMode):
    """Knows the memory of all that was computed inside, as long as anything holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[len(self.storages)] = StorageWeakRef(storage), storage.nbytes()
        return output

    def n_bytes(self, model: nn.Module) -> int:
        """But for the model's own, of which transposed weights are views."""
        gc.collect()
        own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
        alive = {ref.cdata: n for ref, n in self.storages.values() if not ref.expired() and ref.cdata not in own}
        return sum(alive.values())


def with_budget(model: Net, fraction: float) -> Budget:
    told: list[Budget] = []
    budget = Budget(fraction, len(model.blocks), told.append)
    for block in model.blocks:
        keep_within(block, budget, EXPENSIVE_OPERATIONS)
    return budget


def kept_after_forward(model: Net, factor: Tensor | None = None) -> int:
    """`factor` is what all blocks are given."""
    x, factor = torch.ones(64, WIDTH, requires_grad=True), torch.ones(()) if factor is None else factor
    with Live() as live:
        output = model(x, factor * 1.0)
    n_bytes = live.n_bytes(model)
    del output
    return n_bytes


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_the_memory_that_blocks_hold_stays_below_the_budget(fraction: float) -> None:
    model = Net()
    without = kept_after_forward(model)
    budget = with_budget(model, fraction)
    for few in (8192, 256):  # the first forward, in which blocks are measured, and any other
        kept = kept_after_forward(model)
        assert abs(budget.n_bytes_without - without) < 256
        assert budget.n_bytes <= fraction * budget.n_bytes_without
        assert abs(kept - budget.n_bytes) < few
        assert kept > 0.5 * fraction * without
    assert len(budget.ways) == N_BLOCKS


@pytest.mark.parametrize("fraction", [0.2, 0.5, 1.0])
def test_what_all_blocks_are_given_counts_once(fraction: float) -> None:
    model = Net()
    model.blocks = nn.ModuleList(Block(has_norm=False) for _ in range(N_BLOCKS))
    without = kept_after_forward(model, torch.ones(64, WIDTH))
    budget = with_budget(model, fraction)
    for few in (8192, 256):
        assert abs(kept_after_forward(model, torch.ones(64, WIDTH)) - budget.n_bytes) < few
        assert abs(budget.n_bytes_without - without) < 256
    assert budget.n_bytes <= fraction * budget.n_bytes_without


@pytest.mark.parametrize("fraction", [0.3, 0.8])
def test_numbers_are_those_of_a_model_that_keeps_everything(fraction: float) -> None:
    torch.manual_seed(0)
    plain = Net()
    again = copy.deepcopy(plain)
    budget = with_budget(again, fraction)
    found = []
    for model in (plain, again):
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(8, WIDTH), torch.tensor(0.5)).square().sum()
            loss.backward()
            losses.append(loss.detach())
        found.append([*losses, torch.rand(2), *(p.grad for p in model.parameters()), *model.buffers()])
    assert len(set(budget.ways)) == 2
    assert all(map(torch.equal, *found))


def test_tokens_of_experts_are_counted_once() -> None:
    mixture = MoE(WIDTH, 2 * WIDTH, n_experts=4, top_k=2)
    budget = Budget(0.5, 1, lambda budget: None)
    keep_within(mixture, budget, EXPENSIVE_OPERATIONS)
    mixture(torch.randn(2, 3, WIDTH)).sum().backward()
    assert int(mixture.loads.sum()) == 2 * 3 * 2


def test_blocks_take_turns_between_the_two_ways_next_to_the_budget() -> None:
    kept = KeptBytes(none=100, selective=60, full=10, if_none=100)
    expected = {1.0: "none", 0.8: "none selective", 0.6: "selective", 0.4: "selective full", 0.1: "full"}
    for fraction, ways in expected.items():
        budget = Budget(fraction, 20, lambda budget: None)
        for n in range(1, 21):
            budget.choose(kept)
            assert budget.n_bytes <= round(fraction * 100 * n)
        assert set(budget.ways) == set(ways.split())
        assert budget.n_bytes > fraction * 100 * 20 - 90
    over = Budget(0.05, 1, lambda budget: None)
    assert over.choose(kept) == "full"
    dear = Budget(0.7, 2, lambda budget: None)  # to keep what is expensive may take more than to keep everything
    assert [dear.choose(KeptBytes(100, 120, 10, 100)) for _ in range(2)] == ["full", "none"]


def test_forwards_without_gradients_choose_nothing() -> None:
    model = Net()
    budget = with_budget(model, 0.5)
    with torch.no_grad():
        model(torch.ones(4, WIDTH), torch.ones(()))
    assert budget.ways == []
    twin = copy.deepcopy(model)
    twin(torch.ones(4, WIDTH), torch.ones(())).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_block_that_changes_its_input_in_place_is_refused() -> None:
    class InPlace(Block):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            x += scale * self.up(x)[:, :WIDTH]
            return x

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), InPlace())
    keep_within(net[1], Budget(1.0, 1, lambda budget: None), EXPENSIVE_OPERATIONS)
    with pytest.raises(ConfigError, match=r"The forward of InPlace changes what it is given in place"):
        net[1](net[0](torch.ones(2, WIDTH)) * 1.0, torch.ones(()))
