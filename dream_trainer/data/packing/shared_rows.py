"""Packed rows whose positions are shared by ranks: masks over the documents of all, and attention under them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from dream_trainer.compat.attention import BlockMask, attend_elsewhere, attend_flexibly, part_of_document_mask
from dream_trainer.data.packing.attention_mask import PackedSegments, mask_kind, packed_attention, packed_attention_mask
from dream_trainer.errors import StepError
from dream_trainer.parallel.context_attention import ContextAttention, GatheredAttention, UlyssesAttention

Mask = Tensor | BlockMask | PackedSegments
Kind = Literal["auto", "sdpa", "flex", "varlen"]


def handlers(attention: ContextAttention) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Versions of `packed_attention_mask` and `packed_attention` for use when `attention` replaces PyTorch's."""
    shared = (_OfHeads if isinstance(attention, UlyssesAttention) else _OfPositions)(attention)  # type: ignore[arg-type]
    return {packed_attention_mask: shared.mask, packed_attention: shared.attend, attend_elsewhere: shared.attend}


class _OfHeads:
    """Each rank has some heads of whole rows, under whole masks."""

    def __init__(self, attention: UlyssesAttention) -> None:
        self._attention = attention

    def mask(self, documents: Tensor, kind: Kind = "auto", **options: Any) -> Mask:
        return packed_attention_mask(self._attention.parts.joined(documents, 1), kind, **options)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return packed_attention(query, key, value, mask)

        return self._attention.attend_with_own_heads(query, key, value, attend)


class _OfPositions:
    """Each rank has some queries, under a mask of these and all keys."""

    def __init__(self, attention: GatheredAttention) -> None:
        self._attention = attention

    def mask(
        self,
        documents: Tensor,
        kind: Kind = "auto",
        *,
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Mask:
        target = documents.device if device is None else torch.device(device)
        kind = mask_kind(documents, kind, target, None)  # None: never "varlen", unless it was asked for
        if kind == "varlen":
            raise StepError(
                'packed_attention_mask(kind="varlen") has the queries and keys of one rank. Where ranks share '
                'sequences use another kind, or attention="ulysses".'
            )
        parts = self._attention.parts
        whole = parts.joined(documents, 1).to(target, non_blocking=True)
        own, rows = documents.to(target, non_blocking=True), parts.positions(documents.shape[1], target)
        if kind == "flex":
            return part_of_document_mask(own, rows, whole, causal)
        mask = own[:, None, :, None] == whole[:, None, None, :]
        return mask & (rows[:, None] >= torch.arange(whole.shape[1], device=target)) if causal else mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        if isinstance(mask, Tensor):
            grouped = query.shape[1] != key.shape[1]
            return self._attention.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)
        assert isinstance(mask, BlockMask)  # `mask` gives no other kind
        return attend_flexibly(query, *self._attention.gather(key, value), mask)
