"""Attention under any of its names goes to ours in a step whose sequences are shared by ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.api import AttentionTakeover, GatheredAttention, SequenceParts, handlers

PART = 12


class AlikeParts(SequenceParts):
    """In place of a collective: all ranks have this one's part."""

    def __init__(self) -> None:
        super().__init__(0, 2, None, is_balanced=True)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        return torch.cat([part] * 2, dim)

    def sum_of_own(self, whole: Tensor, dim: int) -> Tensor:
        return self.cut(whole, dim) * 2


def attention_of_parts() -> GatheredAttention:
    attention = GatheredAttention(AlikeParts())
    attention.lengths = {PART}
    return attention


def test_every_name_of_attention_goes_to_ours() -> None:
    q, k, v = torch.randn(3, 2, 4, PART, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    packet = torch.ops.aten.scaled_dot_product_attention
    attention = attention_of_parts()
    with AttentionTakeover(attention, handlers(attention)):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for attend in (torch._C._nn.scaled_dot_product_attention, packet, packet.default):
            for _ in range(2):
                assert torch.equal(attend(q, k, v, is_causal=True), expected)
    assert not torch.allclose(packet(q, k, v, is_causal=True), expected)
