"""Attention under any of its names goes to ours in a step whose sequences are shared by ranks."""

import torch
import torch.nn.functional as F

from tests.api import GatheredAttention
from tests.modules.test_context_attention import KnownParts, heads, step


def test_every_name_of_attention_goes_to_ours() -> None:
    wholes = heads(0, 4), heads(1, 4), heads(2, 4)
    parts = KnownParts(1, [torch.stack(wholes[1:])])
    q, k, v = (parts.cut(whole, -2).requires_grad_() for whole in wholes)
    packet = torch.ops.aten.scaled_dot_product_attention
    with step(GatheredAttention(parts), q.shape[-2]):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for attend in (torch._C._nn.scaled_dot_product_attention, packet, packet.default):
            for _ in range(2):
                assert torch.equal(attend(q, k, v, is_causal=True), expected)
    assert not torch.allclose(packet(q, k, v, is_causal=True), expected)
