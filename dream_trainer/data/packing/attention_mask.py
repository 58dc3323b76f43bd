"""Attention in packed rows: a token sees its own document only, with the kernel that the device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dream_trainer.compat.attention import (
    BlockMask,
    attend_elsewhere,
    attend_flexibly,
    attend_varlen,
    keys_are_elsewhere,
    same_document_mask,
)
from dream_trainer.errors import StepError
from dream_trainer.parallel.context_attention import ContextAttention, GatheredAttention, UlyssesAttention

Kind = Literal["auto", "sdpa", "flex", "varlen"]
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedSegments:
    """Where the documents of a batch begin, for kernels that take sequences of many lengths one after the other."""

    cu_seqlens: Tensor
    """First token of each document in the flattened batch, and the number of tokens: int32, `(documents + 1,)`. A row's
    padding is one of them."""
    max_seqlen: int
    """Tokens of the longest of them."""
    causal: bool
    """Whether a token sees none that come after it."""


Mask = Tensor | BlockMask | PackedSegments


def packed_attention_mask(
    documents: Tensor,
    kind: Kind = "auto",
    *,
    causal: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Mask:
    """The mask under which the documents of a packed row do not see each other. Padding sees padding.

    `packed_attention` takes each kind. To use a kind by itself:

        sdpa    bool, `(rows, 1, row_length, row_length)`: `attn_mask` of `scaled_dot_product_attention`
        flex    `block_mask` of `flex_attention`
        varlen  `cu_seqlens` and `max_seqlen` of `torch.nn.attention.varlen.varlen_attn`, FlashAttention and their like,
                over rows flattened to `(rows * row_length, heads, width)`

    Args:
        documents: A batch's `documents`: `(rows, row_length)`. For "varlen" leave them on the host: how many there are
            decides a shape, so from the device it would have to be waited for.
        kind: "auto" is "varlen" on CUDA in half precision from compute capability 8.0 on, "flex" on CUDA else, and
            "sdpa" elsewhere.
        causal: Whether a token sees none that come after it.
        device: Device that computes attention. None for the device of `documents`.
        dtype: Dtype that attention is computed in, for "auto".

    Raises:
        ValueError: `kind` is unknown, or `documents` are of another shape.
    """
    if has_torch_function((documents,)):  # where ranks share the row
        mask: Mask = handle_torch_function(
            packed_attention_mask, (documents,), documents, kind, causal=causal, device=device, dtype=dtype
        )
        return mask
    device = documents.device if device is None else torch.device(device)
    kind = mask_kind(documents, kind, device, dtype)
    if kind == "varlen":
        return _segments(documents, device, causal)
    documents = documents.to(device, non_blocking=True)
    if kind == "flex":
        return same_document_mask(documents, causal)
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    return mask.tril() if causal else mask


def packed_attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Attention under any of the masks; keys and values may have fewer heads (grouped queries).

    Segments on another device than CUDA are attended to one by one, with the work of the documents' lengths squared.

    Args:
        query: Shape `(rows, heads, row_length, width)`.
        key: The same, or with fewer heads.
        value: As `key`.
        mask: Result of `packed_attention_mask` for the batch.

    Returns:
        The shape of `query`.
    """
    if has_torch_function((query, key, value)):
        shared: Tensor = handle_torch_function(packed_attention, (query, key, value), query, key, value, mask)
        return shared
    if isinstance(mask, BlockMask):
        return attend_flexibly(query, key, value, mask)
    if isinstance(mask, Tensor):
        if keys_are_elsewhere() and mask.shape[-1] != key.shape[-2]:
            return attend_elsewhere(query, key, value, mask)
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=query.shape[1] != key.shape[1])
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    flat_query, flat_key, flat_value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if query.device.type == "cuda":
        attended = attend_varlen(flat_query, flat_key, flat_value, mask.cu_seqlens, mask.max_seqlen, mask.causal)
    else:
        sizes = mask.cu_seqlens.diff().tolist()
        parts = zip(*(x.transpose(0, 1).split(sizes, dim=1) for x in (flat_query, flat_key, flat_value)), strict=True)
        each = [F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal) for q, k, v in parts]
        attended = torch.cat(each, dim=1).transpose(0, 1)
    return attended.view(query.shape[0], query.shape[2], *attended.shape[1:]).transpose(1, 2)


def mask_kind(
    documents: Tensor, kind: Kind, device: torch.device, dtype: torch.dtype | None
) -> Literal["sdpa", "flex", "varlen"]:
    """The kind of mask for `documents` by `kind`; raises ValueError for unknown kinds."""
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r} is unknown. Use one of {', '.join(map(repr, get_args(Kind)))}.")
    if documents.ndim != 2:
        shape = tuple(documents.shape)
        raise ValueError(f"documents have the shape {shape}. Give those of a batch: (rows, row_length).")
    if kind != "auto":
        return kind
    if device.type != "cuda":
        return "sdpa"
    return "varlen" if dtype in _HALF and torch.cuda.get_device_capability(device) >= (8, 0) else "flex"


def _segments(documents: Tensor, device: torch.device, causal: bool) -> PackedSegments:
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat((starts, starts.new_tensor([documents.numel()])))
    return PackedSegments(cu_seqlens.to(device, torch.int32, non_blocking=True), int(cu_seqlens.diff().max()), causal)


# -- Packed rows whose positions several ranks share.


def handlers(attention: ContextAttention) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Versions of `packed_attention_mask` and `packed_attention` for use when `attention` replaces PyTorch's."""
    shared = (_OfHeads if isinstance(attention, UlyssesAttention) else _OfPositions)(attention)  # type: ignore[arg-type]
    return {packed_attention_mask: shared.mask, packed_attention: shared.attend, attend_elsewhere: shared.attend}


class _OfHeads:
    """Each rank has some heads of whole rows, under whole masks."""

    def __init__(self, attention: UlyssesAttention) -> None:
        self._attention = attention

    def mask(self, documents: Tensor, kind: Kind, **options: Any) -> Mask:
        return packed_attention_mask(self._attention.parts.joined(documents, 1), kind, **options)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        return self._attention.attend_with_own_heads(query, key, value, partial(packed_attention, mask=mask))


class _OfPositions:
    """Each rank has some queries, under a mask of these and all keys."""

    def __init__(self, attention: GatheredAttention) -> None:
        self._attention = attention

    def mask(self, documents: Tensor, kind: Kind, *, causal: bool, device: Any, dtype: Any) -> Mask:
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
            return same_document_mask(own, causal, rows, whole)
        mask = own[:, None, :, None] == whole[:, None, None, :]
        return mask & (rows[:, None] >= torch.arange(whole.shape[1], device=target)) if causal else mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        if isinstance(mask, Tensor):
            grouped = query.shape[1] != key.shape[1]
            return self._attention.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)
        assert isinstance(mask, BlockMask)  # `mask` gives no other kind
        return attend_flexibly(query, *self._attention.gather(key, value), mask)
