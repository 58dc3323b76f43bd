"""Attention in packed rows by the kernels of a CUDA device, beside each document alone."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from tests.api import PackedSegments, packed_attention, packed_attention_mask

pytestmark = pytest.mark.gpu
LENGTH = 512
DOCUMENTS = torch.tensor([[0] * 200 + [1] * 301 + [-1] * 11, [0] * 7 + [1] * 5 + [2] * 500])


@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_documents_are_apart_and_their_gradients_too(cuda: torch.device, kind: Literal["flex", "varlen"]) -> None:
    generator = torch.Generator(cuda).manual_seed(0)
    inputs = [
        torch.randn(2, 4, LENGTH, 64, device=cuda, dtype=torch.bfloat16, generator=generator).requires_grad_()
        for _ in range(3)
    ]
    mask = packed_attention_mask(DOCUMENTS, kind, device=cuda)
    found = packed_attention(*inputs, mask)  # type: ignore[arg-type]
    weights = torch.randn(found.shape, device=cuda, generator=generator)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    for row in range(2):
        for number in DOCUMENTS[row].unique():
            own = DOCUMENTS[row] == number
            parts = [x.detach()[row : row + 1, :, own].double().requires_grad_() for x in inputs]
            expected = F.scaled_dot_product_attention(*parts, is_causal=True)
            alone = torch.autograd.grad((expected * weights[row : row + 1, :, own]).sum(), parts)
            torch.testing.assert_close(found[row : row + 1, :, own].double(), expected, rtol=0.02, atol=0.02)
            for ours, theirs in zip(gradients, alone, strict=True):
                torch.testing.assert_close(ours[row : row + 1, :, own].double(), theirs, rtol=0.05, atol=0.05)


def test_the_kind_follows_the_device_and_the_precision(cuda: torch.device) -> None:
    half = packed_attention_mask(DOCUMENTS, device=cuda, dtype=torch.bfloat16)
    assert isinstance(half, PackedSegments) == (torch.cuda.get_device_capability() >= (8, 0))
    assert not isinstance(packed_attention_mask(DOCUMENTS, device=cuda), PackedSegments | torch.Tensor)
