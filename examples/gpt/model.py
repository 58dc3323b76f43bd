"""A byte-level GPT in plain PyTorch: nothing here knows about Dream Trainer.

Pre-norm blocks, rotary positions, one embedding table shared by input and output. The output projections of every
block start at zero, so that the model begins as its own unigram table and the first steps are not spent undoing noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of the model; the default has 0.8 million parameters."""

    n_layers: int = 4
    """Transformer blocks."""
    n_heads: int = 4
    """Attention heads; must divide `dim` into even parts."""
    dim: int = 128
    """Width of the residual stream."""
    window: int = 128
    """Bytes the model sees at once."""

    def __post_init__(self) -> None:
        if self.dim % (2 * self.n_heads) != 0:
            raise ValueError(
                f"dim={self.dim} cannot be split into n_heads={self.n_heads} heads of even width, which rotary "
                f"positions need. Use a multiple of {2 * self.n_heads}."
            )


def rotary_tables(window: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation of each pair at each position, both [window, head_dim / 2]."""
    frequency = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(window).float(), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head [batch, heads, time, head_dim] by its position."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Block(nn.Module):
    """Attention and feed-forward, each added to the stream behind its own norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.attention_norm = nn.RMSNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.attention_out = nn.Linear(config.dim, config.dim, bias=False)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward_in = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.feed_forward_out = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """[batch, time, dim] -> the same shape; without a mask each position sees itself and those before it."""
        batch, time, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.n_heads, dim // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, head_dim]
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask, is_causal=mask is None
        )
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, time, dim))
        hidden = F.gelu(self.feed_forward_in(self.feed_forward_norm(x)))
        return x + self.feed_forward_out(hidden)


class GPT(nn.Module):
    """Bytes in, logits over the next byte out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.window = config.window
        self.embedding = nn.Embedding(VOCABULARY_SIZE, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY_SIZE, bias=False)
        self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(config.window, config.dim // config.n_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def init_weights(self) -> None:
        """Normal weights scaled by fan-in, zero for what writes to the residual stream, one for the norms."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.ones_(self.norm.weight)
        for block in self.modules():
            if isinstance(block, Block):
                nn.init.ones_(block.attention_norm.weight)
                nn.init.ones_(block.feed_forward_norm.weight)
                nn.init.normal_(block.qkv.weight, std=block.qkv.in_features**-0.5)
                nn.init.normal_(block.feed_forward_in.weight, std=block.feed_forward_in.in_features**-0.5)
                nn.init.zeros_(block.attention_out.weight)
                nn.init.zeros_(block.feed_forward_out.weight)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Integer bytes [batch, time <= window] -> logits [batch, time, 256].

        Args:
            tokens: The bytes.
            mask: What each position may see, bool [batch, 1, time, time]; None is itself and all before it. Rotary
                positions are relative, so where in a row a document lies makes no difference.
        """
        time = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:time], self.sin[:time], mask)
        return self.head(self.norm(x))
