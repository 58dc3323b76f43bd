"""A transformer over bytes whose feed-forward networks are given: the model of sparse_language.py."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention with 4 heads, then `feed`."""

    def __init__(self, width: int, feed: nn.Module) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_norm, self.feed = nn.RMSNorm(width), feed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.feed_norm(x))


class ByteTransformer(nn.Module):
    """Logits [batch, time, 256] of the next byte; of a pipeline's stages, what the next one takes."""

    def __init__(self, width: int, feeds: Iterable[nn.Module], longest: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Block(width, feed) for feed in feeds)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.bytes is not None:
            x = self.bytes(x) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))
