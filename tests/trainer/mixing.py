"""Blocks that mix positions of a sequence `[batch, length, WIDTH]` by other means than attention, or seem to."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.api import MoE, packed_attention, packed_attention_mask
from tests.trainer.sequences import HEAD, LENGTH, WIDTH

HEADS = WIDTH // HEAD


def made(*shape: int) -> Tensor:
    """Numbers that are the same everywhere, and of no rank's generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 4


def projected(x: Tensor, count: int = 3) -> list[Tensor]:
    """`count` of `[batch, heads, length, HEAD]`."""
    weight = made(x.shape[-1], count * WIDTH)
    return [one.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for one in (x @ weight).chunk(count, -1)]


def joined(attended: Tensor) -> Tensor:
    return attended.transpose(1, 2).flatten(2)


def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Again(torch.autograd.Function):
    """Attention that backward computes again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return again(q, k, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            attended = F.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(attended, (q, k, v), gradients)


class Fresh(torch.autograd.Function):
    """The same, without a context in forward."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return again(q, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = Again.backward


def by_hand(x: Tensor) -> Tensor:
    q, k, v = projected(x)
    weights = (q @ k.mT).exp()
    return joined(weights / weights.sum(-1, keepdim=True) @ v)


def with_sinks(x: Tensor) -> Tensor:
    q, k, v = projected(x)
    k, v = (torch.cat([one.new_zeros(len(x), HEADS, 1, HEAD), one], -2) for one in (k, v))
    return joined(F.scaled_dot_product_attention(q, k, v))


def layer(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A layer of PyTorch's over `[batch, length, WIDTH]`, with the same weights everywhere."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(made(*parameter.shape))

    def run(x: Tensor) -> Tensor:
        out = module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
        return out[0] if isinstance(out, tuple) else out

    return run


def batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x.mT, None, None, training=True).mT


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "own softmax": by_hand,
    "a kernel of aten": lambda x: joined(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*projected(x))[0]
    ),
    "linear attention": lambda x: joined((lambda q, k, v: q @ (k.mT @ v))(*projected(x))),
    "a matrix over positions": lambda x: made(x.shape[1], x.shape[1]) @ x,
    "sinks": with_sinks,
    "the last position": lambda x: x + x[:, -1:],
    "a table from its start": lambda x: x + made(LENGTH, WIDTH)[: x.shape[1]],
    "a running sum": lambda x: x.cumsum(1),
    "a norm of the batch": batch_norm,
    "a mean": lambda x: x - x.mean(1, keepdim=True),
    "a convolution": lambda x: F.conv1d(x.mT, made(WIDTH, WIDTH, 3), padding=1).mT,
    "a recurrence": layer(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "a layer of attention": layer(nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "attention in a Function": lambda x: joined(Again.apply(*projected(x))),
    "attention in a Function without a context": lambda x: joined(Fresh.apply(*projected(x))),
    "attention in a reentrant checkpoint": lambda x: joined(checkpoint(again, *projected(x), use_reentrant=True)),
}  # fmt: skip
"""What sees this rank's part of a sequence alone."""


@torch.library.custom_op("dream_trainer_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Opaque, at each position by itself."""
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda _, gradient: gradient * 2)


def rotated(x: Tensor) -> Tensor:
    one, two = x[..., ::2], x[..., 1::2]
    return torch.stack((one * 0.6 - two * 0.8, one * 0.8 + two * 0.6), -1).flatten(-2)


def by_heads(x: Tensor) -> Tensor:
    q, k, v = projected(F.rms_norm(x, (WIDTH,)))
    attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, scale=0.3)
    return joined(attended) @ made(WIDTH, WIDTH)


def of_packed_rows(x: Tensor) -> Tensor:
    mask = packed_attention_mask(torch.zeros(x.shape[:2], dtype=torch.long))
    return joined(packed_attention(*projected(x), mask))


def to_an_encoder(x: Tensor) -> Tensor:
    """Keys that are no part of the sequence, of lengths that its part is a multiple of, or a few more than it."""
    q = projected(x, 1)[0]
    texts = (made(len(x), length, WIDTH) for length in (4, LENGTH // 2 + 3, 31))
    return sum((joined(F.scaled_dot_product_attention(q, *projected(text, 2))) for text in texts), start=x)


def among_each_positions_own(x: Tensor) -> Tensor:
    """Attention of several variables at each position."""
    each = x.unflatten(-1, (4, -1)).flatten(0, 1)
    return F.scaled_dot_product_attention(each, each, each).unflatten(0, x.shape[:2]).flatten(2)


def mixture(x: Tensor) -> Tensor:
    moe = MoE(WIDTH, 8, n_experts=LENGTH // 2, top_k=2).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(made(*parameter.shape))
    return moe(x)


def without_a_backward(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.detach() + joined(Again.apply(*projected(x)))


RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "an operator": doubled,
    "attention": by_heads,
    "packed rows": of_packed_rows,
    "an encoder": to_an_encoder,
    "each position's own": among_each_positions_own,
    "a mixture": mixture,
    "a Function without a backward": without_a_backward,
    "noise in evaluation": lambda x: x + torch.rand_like(x),
    "pieces of a part": lambda x: torch.cat([x[:, at : at + 4].softmax(-1) for at in range(0, x.shape[1], 4)], 1),
}
"""What does not, though it has shapes or names like it."""
