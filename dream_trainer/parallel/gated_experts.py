"""Experts of a mixture as stacked weights: all of them in one grouped matrix product where the device has it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from dream_trainer.parallel.expert_exchange import ExpertExchange


class GatedExperts(nn.Module):
    """Gated feed-forward networks of one shape: `down(silu(gate(x)) * up(x))`, without biases (Shazeer, 2020,
    arXiv:2002.05202).

    Args:
        n_experts: How many there are.
        width: Features of a row.
        hidden: Features inside of each.

    Attributes:
        gate: `[n_experts, hidden, width]`, each expert's as in an `nn.Linear`.
        up: The same.
        down: `[n_experts, width, hidden]`.
        exchange: Between the ranks that share the experts; None where each rank has all.
    """

    exchange: ExpertExchange | None = None

    def __init__(self, n_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(n_experts, hidden, width))
        self.up = nn.Parameter(torch.empty(n_experts, hidden, width))
        self.down = nn.Parameter(torch.empty(n_experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws each expert's weights as `nn.Linear` does."""
        for weight in self.parameters():
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each of `rows`, `[n, width]` and sorted by expert, through its expert; `counts` are the rows of each."""
        if self.exchange is None:
            return gated(rows, counts, self.gate, self.up, self.down)
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))  # half as much to send
        gate, up, down = (self.exchange.local(weight) for weight in (self.gate, self.up, self.down))
        own = self.exchange.send(rows, counts)
        return own.give_back(gated(own.rows, own.counts, gate, up, down))


def gated(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`rows` `[n, width]`, sorted by expert, through stacked gated networks; `counts` are the rows of each."""
    if _has_grouped_product(rows, gate):
        apply = _Grouped(counts)
        return apply(F.silu(apply(rows, gate)) * apply(rows, up), down)
    # Tensors without values show what is computed, and not how many rows an expert has.
    sizes = [len(rows), *[0] * (len(counts) - 1)] if counts.is_meta else counts.tolist()
    parts = zip(rows.split(sizes), gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.linear(F.silu(F.linear(part, g)) * F.linear(part, u), d) for part, g, u, d in parts])


class _Grouped:
    """One product for all experts; nothing is read on the host."""

    def __init__(self, counts: Tensor) -> None:
        self._ends = counts.cumsum(0).to(torch.int32)

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        if torch.is_autocast_enabled(rows.device.type):  # which does not know this function
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, weights = rows.to(dtype), weights.to(dtype)
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=self._ends)


def _has_grouped_product(rows: Tensor, weights: Tensor) -> bool:
    """Whether there is a kernel: on CUDA in bfloat16, of rows that are whole times 16 bytes."""
    if rows.device.type != "cuda":
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else rows.dtype
    return dtype is torch.bfloat16 and all(size % 8 == 0 for size in weights.shape[1:])
