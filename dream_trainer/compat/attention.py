"""FlexAttention and the kernel for sequences of many lengths; PyTorch calls both prototypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as _flex_operation
from torch.nn.attention.bias import CausalBias as CausalBias, causal_lower_right
from torch.nn.attention.flex_attention import BlockMask as BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import _disable_current_modes

_VARLEN = torch.ops.torch_attn._varlen_attn
KERNELS = frozenset((_flex_operation, _VARLEN, _VARLEN.default))
"""The operations of the two in graphs."""

_elsewhere = False


@contextmanager
def has_keys_elsewhere() -> Iterator[None]:
    """Inside, compiled code uses keys that other ranks hold, and its graphs are changed before they run."""
    global _elsewhere
    before, _elsewhere = _elsewhere, True
    try:
        yield
    finally:
        _elsewhere = before


def keys_are_elsewhere() -> bool:
    """Whether the call is inside `has_keys_elsewhere`. Compiled code guards on it and is recompiled outside."""
    return _elsewhere


def attend_elsewhere(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Stands in a graph for attention under a mask over keys that other ranks have, until the graph is changed."""
    return query + 0 * (key.sum() + value.sum())


@lru_cache(maxsize=64)
def causal_to_the_last_key(queries: int, keys: int) -> CausalBias:
    """The mask under which the last query sees the last key, and each before it one less, for kernels that know it."""
    with _disable_current_modes():  # it cannot be made under one, such as that of selective checkpointing
        return causal_lower_right(queries, keys)


def same_document_mask(
    documents: Tensor, causal: bool, positions: Tensor | None = None, whole: Tensor | None = None
) -> BlockMask:
    """FlexAttention's mask for packed rows; for queries at some `positions` of `whole` ones, and all keys of these."""
    of_keys = documents if whole is None else whole

    def may_see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_same = documents[row, query] == of_keys[row, key]
        place = query if positions is None else positions[query]
        return is_same & (place >= key) if causal else is_same

    return create_block_mask(may_see, len(of_keys), None, documents.shape[1], of_keys.shape[1], device=of_keys.device)


def attend_flexibly(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Attention `(rows, heads, length, width)` with a block mask; compiled, except on a CPU, which has no backward."""
    has_groups = query.shape[1] != key.shape[1]
    attend = flex_attention if query.device.type == "cpu" else _compiled_flex_attention()
    return cast(Tensor, attend(query, key, value, block_mask=mask, enable_gqa=has_groups))


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, causal: bool) -> Tensor:
    """Attention `(tokens, heads, width)` within each sequence, in float16 or bfloat16 on CUDA."""
    window = (-1, 0) if causal else (-1, -1)
    attended = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, window_size=window)
    return cast(Tensor, attended)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)
