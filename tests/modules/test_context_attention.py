"""Attention of sequences that ranks share, each rank's part computed in this process, and what is refused in a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention

from tests import api

LENGTH, RANKS = 24, 3


class KnownParts(api.SequenceParts):
    """In place of a collective: what the ranks would send is known."""

    def __init__(self, rank: int, wholes: list[Tensor]) -> None:
        super().__init__(rank, RANKS, None, is_balanced=True)
        self.wholes = wholes

    def gather(self, part: Tensor, dim: int) -> Tensor:
        whole = next(whole for whole in self.wholes if torch.equal(self.cut(whole, dim), part))
        return whole.clone()


def heads(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, LENGTH, 5, dtype=torch.float64, generator=generator)


def step(attention: api.ContextAttention, *lengths: int) -> api.AttentionTakeover:
    attention.lengths = set(lengths)
    return api.AttentionTakeover(attention, api.handlers(attention))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_position_is_one_ranks_and_balanced_ranks_see_as_many_keys(ranks: int) -> None:
    for is_balanced in (True, False):
        whole = torch.arange(4 * ranks)
        parts = [api.SequenceParts(rank, ranks, None, is_balanced=is_balanced).cut(whole, 0) for rank in range(ranks)]
        assert torch.cat(parts).sort().values.equal(whole)
        if is_balanced:
            assert len({int((part + 1).sum()) for part in parts}) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("kind", ["causal", "documents", "flex"])
def test_each_ranks_queries_see_what_they_would_in_the_whole(rank: int, kind: str) -> None:
    def run(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, mask_kind: str = "auto") -> Tensor:
        if kind == "causal":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=0.3)
        mask = api.packed_attention_mask(documents, mask_kind)
        assert isinstance(mask, api.BlockMask) == (mask_kind == "flex")
        return api.packed_attention(query, key, value, mask)

    query, key, value = heads(0, 4), heads(1, 2), heads(2, 2)
    documents = torch.arange(LENGTH).div(7, rounding_mode="floor").expand(2, -1).contiguous()
    parts = KnownParts(rank, [torch.stack((key, value)), documents])
    q, k, v = (parts.cut(tensor, -2) for tensor in (query, key, value))
    expected = run(query, key, value, documents)
    with step(api.GatheredAttention(parts), q.shape[-2]):
        found = run(q, k, v, parts.cut(documents, 1), "flex" if kind == "flex" else "auto")
    torch.testing.assert_close(found, parts.cut(expected, -2), rtol=1e-12, atol=1e-12)


def test_keys_that_every_rank_has_whole_are_attended_to_as_they_are() -> None:
    query, key = heads(0, 4)[..., :8, :], heads(1, 4)
    with step(api.GatheredAttention(KnownParts(0, [])), 8):
        found = F.scaled_dot_product_attention(query, key, key)
    assert torch.equal(found, F.scaled_dot_product_attention(query, key, key))


def attend(keys: int = 8, queries: int = 8, **options: Any) -> Tensor:
    q, k = heads(0, 4)[..., :queries, :], heads(1, 4)[..., :keys, :]
    return F.scaled_dot_product_attention(q, k, k, **options)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "mask of own keys": (
        lambda: attend(attn_mask=torch.ones(8, 8, dtype=torch.bool)),
        r"has the shape \(8, 8\), and this rank's 8 queries .* must end in \(8, 24\), or \(1, 24\). Only cut a whole",
    ),
    "causal and mask": (
        lambda: attend(attn_mask=torch.ones(8, 24, dtype=torch.bool), is_causal=True),
        "is_causal=True and attn_mask. Use one of them",
    ),
    "bias": (lambda: attend(attn_mask=causal_lower_right(8, 8)), "CausalBias, which knows nothing .* is_causal=True"),
    "queries of none": (lambda: attend(queries=5), "attention of 5 queries to 8 keys, which are .* the queries are no"),
    "keys of none": (lambda: attend(keys=5, is_causal=True), "causal attention of 8 queries, this .* to 5 keys, which"),
    "varlen": (
        lambda: api.packed_attention_mask(torch.zeros(2, 8, dtype=torch.long), "varlen"),
        'kind="varlen"\\) has the queries and keys of one rank',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_would_see_one_ranks_positions_alone_is_refused(mistake: str) -> None:
    run, told = MISTAKES[mistake]
    with step(api.GatheredAttention(KnownParts(0, [])), 8), pytest.raises(api.StepError, match=told):
        run()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_is_compiled_is_refused_by_the_compiler_with_our_words() -> None:
    with step(api.GatheredAttention(KnownParts(0, [])), 8), pytest.raises(Unsupported, match="torch.compile, or flex_"):
        flex_attention(*[torch.zeros(1, 2, 8, 16)] * 3)


def test_heads_that_ranks_cannot_divide_are_named() -> None:
    attention = api.UlyssesAttention(api.SequenceParts(0, RANKS, None, is_balanced=False))
    with (
        step(attention, 8),
        pytest.raises(api.ConfigError, match="context_parallel=3 gives .* 4 heads of queries and 4"),
    ):
        attend(is_causal=True)
    for shape in ((8, 3), (2, 1, 3, 8, 3)):
        with step(attention, 8), pytest.raises(api.StepError, match="whose heads it does not know"):
            F.scaled_dot_product_attention(*[torch.zeros(shape)] * 3)
    mask = torch.ones(4, 8, 24, dtype=torch.bool)
    with step(attention, 8), pytest.raises(api.StepError, match="one for each head, and ranks have different heads"):
        attend(attn_mask=mask)
