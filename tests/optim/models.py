"""A small transformer-like model with everything that parameter groups tell apart, and hand-written training."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

N_TOKENS, WIDTH, INNER = 7, 6, 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, n_blocks: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(4, WIDTH))
        self.embedding = nn.Embedding(N_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(n_blocks))
        self.norm = nn.LayerNorm((2, WIDTH // 2))  # a normalisation weight of two dimensions
        self.head = nn.Linear(WIDTH, N_TOKENS, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.unflatten(-1, (2, WIDTH // 2))).flatten(-2)
        return self.head(x)


def model(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> Transformer:
    """The same weights each time."""
    torch.manual_seed(0)
    return Transformer(tied=tied).to(dtype)


def batch(rank: int = 0, ranks: int = 1) -> Tensor:
    """Tokens of the `rank`-th of `ranks` equal parts of one fixed batch, (8 / ranks, 4)."""
    tokens = torch.randint(0, N_TOKENS, (8, 4), generator=torch.Generator().manual_seed(1))
    return tokens.chunk(ranks)[rank]


def loss(module: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of telling each token's successor in a row, round and round."""
    return F.cross_entropy(module(tokens).flatten(0, 1), tokens.roll(-1, dims=1).flatten())


def train(module: nn.Module, optimizers: list[torch.optim.Optimizer], tokens: Tensor, steps: int = 3) -> None:
    """Plain PyTorch: forward, backward, step, zero."""
    for _ in range(steps):
        loss(module, tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
