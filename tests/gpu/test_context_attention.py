"""Each rank's part of attention by the kernels of a CUDA device, beside the whole: all ranks in one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import api

pytestmark = pytest.mark.gpu
LENGTH, RANKS = 1024, 2


class Known(api.GatheredAttention):
    """Keys, values and documents of all ranks are known."""

    def __init__(self, rank: int, key: Tensor, value: Tensor, documents: Tensor) -> None:
        super().__init__(api.SequenceParts(rank, RANKS, None, is_balanced=True))
        self._whole = key, value
        self.parts.joined = lambda part, dim: documents  # type: ignore[method-assign]

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._whole


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_ranks_together_are_the_whole_and_their_gradients_too(
    cuda: torch.device, dtype: torch.dtype, is_packed: bool, kv_heads: int
) -> None:
    generator = torch.Generator(cuda).manual_seed(0)
    query, key, value, weights = (
        torch.randn(2, heads, LENGTH, 64, device=cuda, dtype=dtype, generator=generator)
        for heads in (4, kv_heads, kv_heads, 4)
    )
    documents = torch.arange(LENGTH, device=cuda).div(300, rounding_mode="floor").expand(2, -1).contiguous()
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    found, gradients = [], [torch.zeros_like(tensor, dtype=torch.float64) for tensor in inputs]
    for rank in range(RANKS):
        attention = Known(rank, key, value, documents)
        own = attention.parts.cut(query, -2)
        attention.lengths = {own.shape[-2]}
        with api.AttentionTakeover(attention, api.handlers(attention)):
            if is_packed:
                mask = api.packed_attention_mask(attention.parts.cut(documents, 1))
                part = api.packed_attention(own, *(attention.parts.cut(x, -2) for x in (key, value)), mask)
            else:
                shared = [attention.parts.cut(x, -2) for x in (key, value)]
                part = F.scaled_dot_product_attention(own, *shared, is_causal=True, enable_gqa=True)
        found.append(part)
        loss = (part.float() * attention.parts.cut(weights, -2)).sum()
        for total, gradient in zip(gradients, torch.autograd.grad(loss, inputs), strict=True):
            total += gradient
    double = [tensor.detach().double().requires_grad_() for tensor in inputs]
    whole_mask = api.packed_attention_mask(documents, "sdpa") if is_packed else None
    expected = F.scaled_dot_product_attention(*double, whole_mask, is_causal=not is_packed, enable_gqa=True)
    exact = torch.autograd.grad((expected * weights).sum(), double)
    off = 0.05 if dtype is torch.bfloat16 else 2e-2
    for rank, part in enumerate(found):
        own = api.SequenceParts(rank, RANKS, None, is_balanced=True).cut(expected, -2)
        torch.testing.assert_close(part.double(), own, rtol=off, atol=off)
    for total, gradient in zip(gradients, exact, strict=True):
        torch.testing.assert_close(total, gradient, rtol=off, atol=off)
