"""Blocks that are computed again draw what they drew."""

import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests import api

ROWS, PART, WIDTH = 8, 4, 6


class Skipping(nn.Module):
    """Leaves itself out, as a number of torch's or of Python's says."""

    def __init__(self, of_python: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.double)
        self.of_python = of_python
        self.skipped: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.skipped.append((random.random() if self.of_python else float(torch.rand(()))) < 0.5)
        return x if self.skipped[-1] else F.dropout(torch.tanh(self.linear(x)))


@pytest.mark.parametrize("of_python", [False, True])
def test_what_a_block_drew_is_drawn_again_when_it_is_computed_again(of_python: bool) -> None:
    def gradients(keep: list[str] | None) -> tuple[Tensor, list[bool]]:
        torch.manual_seed(0)
        random.seed(3)  # whose number after those of the blocks would leave out one that has run
        blocks = nn.Sequential(*(Skipping(of_python) for _ in range(6)))
        for block in blocks:
            if keep is not None:
                api.recompute(block, keep)
        x = torch.randn(ROWS, PART, WIDTH, dtype=torch.double, requires_grad=True)
        blocks(x).square().sum().backward()
        return torch.cat([x.grad.flatten(), torch.tensor([random.random()])]), [block.skipped[0] for block in blocks]

    plain, skipped = gradients(None)
    assert len(set(skipped)) == 2
    for keep in ([], ["aten.mm.default"]):
        again, skipped_then = gradients(keep)
        assert torch.equal(plain, again)
        assert skipped_then == skipped
