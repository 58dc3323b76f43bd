"""Attention of sequences that ranks share: in place of `scaled_dot_product_attention`, with its arguments.

Gathered: keys and values of all ranks, this rank's queries. Ulysses: all positions, this rank's heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dream_trainer.checks import refuse
from dream_trainer.compat.attention import CausalBias, causal_to_the_last_key
from dream_trainer.compat.pytorch import is_dtensor
from dream_trainer.errors import ConfigError, StepError
from dream_trainer.parallel.sequence_parts import SequenceParts
from dream_trainer.parallel.shared_draws import PartShapes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Masked = Callable[..., Tensor]


class ContextAttention(ABC):
    """What all ways have in common."""

    def __init__(self, parts: SequenceParts) -> None:
        self.parts = parts  # who has which positions
        self.lengths: set[int] = set()  # this rank's positions of the running batch's sequences
        self.shapes = PartShapes()  # of the running batch

    def in_graphs(self) -> ContextAttention:
        """The same for the lengths of now, with collectives that the compiler knows."""
        attention = copy(self)
        attention.parts, attention.lengths = self.parts.in_graphs(), _KnownLengths(self.lengths)
        return attention

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """PyTorch's, over all ranks' positions. A mask's columns are those of the whole sequence, in its order."""
        self._refuse_split_layers(query)
        attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
        if key.shape[-2] not in self.lengths:
            if query.shape[-2] in self.lengths and is_causal:
                raise StepError(
                    f"causal attention of {query.shape[-2]} queries, this rank's part of a sequence, to "
                    f"{key.shape[-2]} keys, which are no part of it. Cut both in cut_batch, or neither."
                )
            return attend(query, key, value, attn_mask, is_causal=is_causal)
        self._refuse_unlike(query, key, attn_mask, is_causal)
        query, key, value = _under_autocast(query, key, value)
        return self._attend(query, key, value, attn_mask, is_causal, attend)

    @abstractmethod
    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, attend: Masked
    ) -> Tensor:
        """The same for what is of the shared sequence; `attend` is PyTorch's, with all but mask and `is_causal`."""

    def _refuse_split_layers(self, query: Tensor) -> None:
        if is_dtensor(query):
            raise StepError(
                "attention was called with DTensors under context_parallel. Have the plan of tensor parallelism give "
                "local heads (use_local_output=True, ColwiseParallel's default)."
            )

    def _refuse_unlike(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> None:
        queries, keys = query.shape[-2], key.shape[-2]
        columns, wrong = keys * self.parts.size, ""
        if queries not in self.lengths or (is_causal and queries != keys):
            wrong = (
                f"attention of {queries} queries to {keys} keys, which are this rank's part of a sequence: the queries "
                "are no such part. Cut what they come from in cut_batch, too."
            )
        elif isinstance(mask, CausalBias):
            wrong = "attn_mask is a CausalBias, which knows nothing of other ranks' positions. Use is_causal=True."
        elif mask is not None and is_causal:
            wrong = "attention was called with is_causal=True and attn_mask. Use one of them."
        elif mask is not None and (mask.shape[-1] != columns or mask.shape[-2] not in (1, queries)):
            wrong = (
                f"attn_mask has the shape {tuple(mask.shape)}, and this rank's {queries} queries see the keys of all "
                f"{self.parts.size} ranks: it must end in ({queries}, {columns}), or (1, {columns}). Cut a whole mask "
                "along its queries alone, cut(mask, dim=-2), or make it with packed_attention_mask."
            )
        refuse(wrong, wrong, StepError)


class _KnownLengths(set[int]):
    """Looked for among sizes that a compiler may not know yet, such as how many tokens an expert gets."""

    def __contains__(self, size: object) -> bool:
        return isinstance(size, int) and super().__contains__(size)

    def isdisjoint(self, sizes: Iterable[object]) -> bool:
        """Whether none of `sizes` is known to be one of these."""
        return not any(size in self for size in sizes)


class GatheredAttention(ContextAttention):
    """All keys and values on each rank, its own queries."""

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, attend: Masked
    ) -> Tensor:
        key, value = self.gather(key, value)
        if not is_causal:
            return attend(query, key, value, mask)
        length = key.shape[-2] // self.parts.n_chunks
        attended = []
        for chunk, queries in zip(self.parts.chunks, query.split(length, dim=-2), strict=True):
            seen = (chunk + 1) * length
            mask = causal_to_the_last_key(length, seen)
            attended.append(attend(queries, key[..., :seen, :], value[..., :seen, :], mask))
        return torch.cat(attended, dim=-2)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all positions, in one collective where they have one shape."""
        if key.shape != value.shape:
            return self.parts.joined(key, -2), self.parts.joined(value, -2)
        both = self.parts.joined(torch.stack((key, value)), -2)
        return both[0], both[1]


class UlyssesAttention(ContextAttention):
    """All positions on each rank, its share of the heads."""

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, attend: Masked
    ) -> Tensor:
        dims = {tensor.ndim for tensor in (query, key, value)}
        if dims == {3}:  # heads of all sequences
            return self._attend(query[None], key[None], value[None], mask, is_causal, attend)[0]
        if dims != {4}:
            raise StepError(
                f'attention="ulysses" was called with queries of the shape {tuple(query.shape)} and keys of '
                f"{tuple(key.shape)}, whose heads it does not know. Give it [batch, heads, length, width] or "
                '[heads, length, width], or use attention="gathered".'
            )
        if mask is not None:
            if mask.ndim > 2 and mask.shape[-3] != 1:
                raise StepError(
                    f"attn_mask has the shape {tuple(mask.shape)}, one for each head, of which ranks have others. Use "
                    'attention="gathered", or one mask for all heads.'
                )
            if mask.shape[-2] > 1:
                mask = self.parts.joined(mask, -2)
        return self.attend_with_own_heads(query, key, value, partial(attend, attn_mask=mask, is_causal=is_causal))

    def attend_with_own_heads(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        size, heads = self.parts.size, (query.shape[1], key.shape[1])
        if any(count % size for count in heads):
            raise ConfigError(
                f'attention="ulysses" with context_parallel={size} gives each rank some of the {heads[0]} heads of '
                f"queries and {heads[1]} of keys on this rank, which {size} does not divide. Use a "
                'divisor of both, or attention="gathered".'
            )
        # In one collective: for each rank its heads of all three.
        split = [tensor.unflatten(1, (size, -1)).movedim(1, 0) for tensor in (query, key, value)]
        flat = self.parts.exchanged(torch.cat([tensor.flatten(1) for tensor in split], dim=1))
        pieces = flat.split([tensor[0].numel() for tensor in split], dim=1)
        whole = [
            piece.view(tensor.shape).movedim(0, 2).flatten(2, 3) for piece, tensor in zip(pieces, split, strict=True)
        ]
        attended = attend(*whole)
        by_rank = attended.unflatten(2, (size, -1)).movedim(2, 0)
        return self.parts.exchanged(by_rank).movedim(0, 1).flatten(1, 2)


def _under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as `scaled_dot_product_attention` would: before they are sent, so that less is."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
