"""The network of the example diffusion.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block that is told label and angle by the condition [batch, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.condition = nn.LayerNorm(width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + self.layers(self.norm(x) + self.condition(condition))


class Denoiser(nn.Module):
    """The direction cos(a) * noise - sin(a) * digit, [batch, 64], of a noised digit, its label and its angle."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.label, self.angle = nn.Embedding(10, width), nn.Linear(16, width)
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, noised: Tensor, label: Tensor, angle: Tensor) -> Tensor:
        waves = angle * torch.arange(1, 9, device=angle.device)
        condition = F.silu(self.label(label) + self.angle(torch.cat([waves.sin(), waves.cos()], dim=1)))
        x = self.first(noised)
        for block in self.blocks:
            x = block(x, condition)
        return self.last(x)
