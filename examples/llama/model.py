"""A Llama in plain PyTorch: nothing here knows about Dream Trainer.

Pre-norm blocks of grouped-query attention with rotary positions and SwiGLU, as in Llama 3. Two choices make it easy to
run elsewhere: rotary positions turn the two halves of a head, as Hugging Face's checkpoints expect, so that weights
load without a permutation; and no code asks the config for a number of heads, so that tensor parallelism may give each
rank some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later stretch rotary positions beyond the context they were trained on.

    Channels that turn often within the original context keep their frequency, those that turn seldom are slowed by
    `factor`, and those between are blended.
    """

    factor: float
    """By how much the slowest channels are slowed."""
    low_freq_factor: float = 1.0
    """Channels with fewer turns than this in the original context are slowed in full."""
    high_freq_factor: float = 4.0
    """Channels with more turns than this keep their frequency."""
    original_max_seq_len: int = 8192
    """Tokens of the original context."""

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not below high_freq_factor={self.high_freq_factor}, so "
                "there is nothing to blend between. Llama 3 has 1 and 4."
            )


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of the model; `PRESETS` has some."""

    vocab_size: int = 256
    """Tokens; 256 are enough for bytes."""
    dim: int = 256
    """Width of the residual stream."""
    n_layers: int = 6
    """Transformer blocks."""
    n_heads: int = 8
    """Query heads; must divide `dim` into even parts."""
    n_kv_heads: int = 4
    """Key and value heads; must divide `n_heads`, and is equal to it in multi-head attention."""
    hidden_dim: int = 768
    """Width of the feed-forward's hidden layer."""
    rope_theta: float = 500_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How rotary positions are stretched; None leaves them."""
    norm_eps: float = 1e-5
    """Added to the mean square in each norm."""
    max_seq_len: int = 2048
    """Most tokens of one sequence; the rotary tables have this length."""
    tie_embeddings: bool = False
    """Whether the head's weight is the embedding's."""

    def __post_init__(self) -> None:
        if self.dim % (2 * self.n_heads) != 0:
            raise ValueError(
                f"dim={self.dim} cannot be split into n_heads={self.n_heads} heads of even width, which rotary "
                f"positions need. Use a dim that is a multiple of {2 * self.n_heads}."
            )
        if self.n_heads % self.n_kv_heads != 0:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}, so query heads cannot share "
                "them evenly. Use a divisor."
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per token, as model FLOPs utilisation counts them.

        6 for each weight that is multiplied with (the head is, the lookup of an embedding is not) and 12 for each
        position that a query is compared with. As in most published figures, attention counts all `seq_len` positions,
        of which a causal kernel needs half. What activation checkpointing computes again does not count.
        """
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        feed_forward = 3 * self.dim * self.hidden_dim
        multiplied = self.n_layers * (attention + feed_forward) + self.vocab_size * self.dim
        return 6 * multiplied + 12 * self.n_layers * self.dim * seq_len


PRESETS = {
    # So many small heads that tensor parallelism can be tried on up to 8 ranks.
    "tiny": LlamaConfig(dim=64, n_layers=2, n_heads=16, n_kv_heads=8, hidden_dim=128, max_seq_len=256),
    "debug": LlamaConfig(),
    # Llama 3.2 1B and Llama 3.1 8B.
    "1b": LlamaConfig(
        vocab_size=128_256,
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        max_seq_len=131_072,
        tie_embeddings=True,
    ),
    "8b": LlamaConfig(
        vocab_size=128_256,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14_336,
        rope_scaling=RopeScaling(factor=8.0),
        max_seq_len=131_072,
    ),
}


def rotary_frequencies(config: LlamaConfig) -> Tensor:
    """Radians per token of each pair of channels, float32 [head_dim / 2]."""
    # In float32 and in this order, as the published weights were trained: far positions feel the last bit.
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequency / scaling.factor, frequency, kept.clamp(0.0, 1.0))


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their position. All blocks share one, and so one table.

    Blocks hold the module instead of being handed the tables, because `fully_shard` under mixed precision casts the
    tensors that a block is handed: cosines and sines would keep two or three digits.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(config.max_seq_len).float(), rotary_frequencies(config))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[batch, heads, time, head_dim] at positions [time] or [batch, time] -> the same, turned in the tables'
        precision."""
        cos, sin = self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention whose query heads share key and value heads in groups."""

    def __init__(self, config: LlamaConfig, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.rope = rope

    def forward(self, x: Tensor, *, positions: Tensor) -> Tensor:
        """[batch, time, dim] -> the same shape."""
        q, k, v = (self._heads(projection(x)) for projection in (self.wq, self.wk, self.wv))
        grouped = k.shape[1] != q.shape[1]
        q, k = self.rope(q, positions), self.rope(k, positions)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.wo(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, time, heads * head_dim] -> [batch, heads, time, head_dim], for as many heads as this rank has."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a hidden layer gated by another."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] -> the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each added to the stream behind its own norm."""

    def __init__(self, config: LlamaConfig, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, rope)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[batch, time, dim] -> the same shape."""
        x = x + self.attention(self.attention_norm(x), positions=positions)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Tokens in, logits over the next token out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = RotaryEmbedding(config)
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, self.rope) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def init_weights(self) -> None:
        """Normal weights of deviation 0.02; less for what writes to the residual stream, so that depth adds nothing.

        There are two writers per block, so each is scaled by 1 / sqrt(2 * n_layers), as in GPT-2.
        """
        std = 0.02
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        for layer in self.modules():
            if isinstance(layer, Block):
                for writer in (layer.attention.wo, layer.feed_forward.w2):
                    nn.init.normal_(writer.weight, std=std / math.sqrt(2 * len(self.layers)))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Any:
        """Integer tokens [batch, time <= max_seq_len] -> logits [batch, time, vocab_size].

        Positions [time] or [batch, time] are where the tokens are in their sequences; None for from 0 on. Of a
        pipeline's stages all but the last give what the next one takes: [batch, time, dim], and the positions, which
        ranks that split time between layers could not tell.
        """
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"{tokens.shape[1]} tokens are more than max_seq_len={self.config.max_seq_len}. "
                "Use shorter sequences, or raise max_seq_len."
            )
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = tokens if self.embed is None else self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return (x, positions) if self.head is None else self.head(self.norm(x))


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor], prompt: Tensor, length: int, *, window: int, temperature: float = 0.8
) -> Tensor:
    """Continues `prompt` by `length` tokens, each drawn from the model's last `window` tokens.

    A sharded model gathers its weights in each forward, so every rank must call this together. All draw from the same
    seed on the CPU and so choose the same tokens.

    Args:
        model: Tokens to logits.
        prompt: Integer tokens [time], on the model's device.
        length: Tokens to add.
        window: Most tokens that the model sees.
        temperature: Divides the logits; lower is more predictable.

    Returns:
        Tokens [time + length].
    """
    generator = torch.Generator().manual_seed(0)
    tokens = prompt
    for _ in range(length):
        logits = model(tokens[-window:].unsqueeze(0))[0, -1].float().cpu()
        drawn = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)))
    return tokens
