"""Compiled blocks on ranks that share sequences, called in every way that models have, give what one process does."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.api import GatheredAttention, SequenceParts, compile_with_shared_attention
from tests.modules.test_context_attention import step
from tests.worlds import gloo_group, run_world

LENGTH, WIDTH, HEADS = 16, 8, 2


@torch.compiler.allow_in_graph
def opaque(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_aten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    whole = torch.ops.aten.scaled_dot_product_attention(q, k, v)
    return whole + torch.ops.aten.scaled_dot_product_attention.default(q, k, v, is_causal=True)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, attend: Callable[..., Tensor], number: int = 0) -> None:
        super().__init__()
        self.attend, self.number = attend, number
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)) / (1 + self.number)


class Counting(Block):
    """Changes a number of its own with each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return super().forward(x)


CASES: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "compiled around": (lambda: [Block(plain), Block(plain)], "aot_eager"),
    "functions of aten": (lambda: [Block(by_aten)], "aot_eager"),
    "functions that the compiler leaves whole": (lambda: [Block(opaque)], "aot_eager"),
    "more numbers than the compiler allows": (lambda: [Block(plain, number) for number in range(4)], "eager"),
    "a number that changes": (lambda: [Counting(plain)] * 6, "eager"),
}


def train(blocks: nn.ModuleList, run: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    y = run(x)
    (y * weight).sum().backward()
    return y.detach()


@gloo_group()
def observe() -> dict[str, float]:
    """For each case by how much outputs and gradients differ."""
    parts = SequenceParts(dist.get_rank(), 2, dist.group.WORLD, is_balanced=True)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 2, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    seen = {}
    for name, (make, backend) in CASES.items():
        torch._dynamo.reset()
        torch.manual_seed(1)
        whole = nn.Sequential(*make()).double()
        own = deepcopy(whole)
        expected = train(whole, whole, x, weight)
        for block in own:
            compile_with_shared_attention(block, backend=backend, mode=None)
        x_of_rank, weight_of_rank, expected = (parts.cut(tensor, 1) for tensor in (x, weight, expected))
        run = torch.compile(lambda x, own=own: own(x) * 1, backend="eager") if name == "compiled around" else own
        few = torch._dynamo.config.patch(recompile_limit=2)  # the default is 8
        with few, step(GatheredAttention(parts), LENGTH // 2):
            y = train(own, run, x_of_rank, weight_of_rank)
        worst = (y - expected).abs().max()
        for p, q in zip(own.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(p.grad)
            worst = max(worst, (p.grad - q.grad).abs().max())
        seen[name] = float(worst)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(observe, 2)


@pytest.mark.parametrize("case", CASES)
def test_each_ranks_part_is_that_of_the_whole(ranks: list[dict[str, Any]], case: str) -> None:
    for seen in ranks:
        assert seen[case] < 1e-10
