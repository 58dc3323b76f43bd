"""Attention of sequences that ranks share, each rank's part computed in this process, and what is refused in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from dream_trainer.compat.attention import BlockMask
from dream_trainer.data.packing.attention_mask import packed_attention, packed_attention_mask
from dream_trainer.data.packing.packed_rows import handlers
from dream_trainer.errors import ConfigError, StepError
from dream_trainer.modules.attention_takeover import AttentionTakeover
from dream_trainer.modules.context_attention import ContextAttention, GatheredAttention, UlyssesAttention
from dream_trainer.modules.sequence_parts import SequenceParts

LENGTH, RANKS = 24, 3


class KnownParts(SequenceParts):
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


def step(attention: ContextAttention, *lengths: int, warn: Callable[[str, str], None] = print) -> AttentionTakeover:
    attention.lengths = set(lengths)
    return AttentionTakeover(attention, handlers, warn)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_position_is_one_ranks_and_balanced_ranks_see_as_many_keys(ranks: int) -> None:
    for is_balanced in (True, False):
        whole = torch.arange(4 * ranks)
        parts = [SequenceParts(rank, ranks, None, is_balanced=is_balanced).cut(whole, 0) for rank in range(ranks)]
        assert torch.cat(parts).sort().values.equal(whole)
        if is_balanced:
            assert len({int((part + 1).sum()) for part in parts}) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("kind", ["causal", "all", "mask", "scores", "documents", "flex"])
def test_each_ranks_queries_see_what_they_would_in_the_whole(rank: int, kind: str) -> None:
    query, key, value = heads(0, 4), heads(1, 2), heads(2, 2)
    documents = torch.arange(LENGTH).div(7, rounding_mode="floor").expand(2, -1).contiguous()
    parts = KnownParts(rank, [torch.stack((key, value)), documents])
    q, k, v = (parts.cut(tensor, -2) for tensor in (query, key, value))
    own = parts.cut(documents, 1)
    options: dict[str, Any] = {"enable_gqa": True, "scale": 0.3}
    whole_mask = None
    if kind in ("documents", "flex"):
        whole_mask = packed_attention_mask(documents)
        expected = packed_attention(query, key, value, whole_mask)
    else:
        if kind == "mask":
            whole_mask = torch.rand(1, 1, LENGTH, LENGTH) < 0.7
        elif kind == "scores":
            whole_mask = torch.randn(4, LENGTH, LENGTH, dtype=torch.float64)
        options["is_causal"] = kind == "causal"
        expected = F.scaled_dot_product_attention(query, key, value, whole_mask, **options)
    with step(GatheredAttention(parts), q.shape[-2]):
        if kind in ("documents", "flex"):
            mask = packed_attention_mask(own, "flex" if kind == "flex" else "auto")
            assert isinstance(mask, BlockMask) == (kind == "flex")
            found = packed_attention(q, k, v, mask)
        else:
            own_mask = None if whole_mask is None else parts.cut(whole_mask, -2)
            found = F.scaled_dot_product_attention(q, k, v, own_mask, **options)
    torch.testing.assert_close(found, parts.cut(expected, -2), rtol=1e-12, atol=1e-12)


def test_keys_that_every_rank_has_whole_are_attended_to_as_they_are() -> None:
    query, key = heads(0, 4)[..., :8, :], heads(1, 4)
    with step(GatheredAttention(KnownParts(0, [])), 8):
        found = F.scaled_dot_product_attention(query, key, key)
    assert torch.equal(found, F.scaled_dot_product_attention(query, key, key))


def attend(keys: int = 8, queries: int = 8, **options: Any) -> Tensor:
    q, k = heads(0, 4)[..., :queries, :], heads(1, 4)[..., :keys, :]
    return F.scaled_dot_product_attention(q, k, k, **options)


def own_attention() -> Tensor:
    q = heads(0, 4)[..., :8, :]
    return torch.softmax(q @ q.mT, -1) @ q


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "own attention": (own_attention, r"softmax over scores of the shape \(2, 4, 8, 8\): the model computes attention"),
    "own attention by F": (
        lambda: F.softmax(torch.zeros(2, 4, 8, 8), dim=-1),
        "the model computes attention by itself",
    ),
    "multi-head": (
        lambda: nn.MultiheadAttention(4, 2)(*[torch.zeros(8, 2, 4)] * 3),
        "nn.MultiheadAttention, which nn.TransformerEncoderLayer",
    ),
    "convolution": (lambda: nn.Conv1d(3, 3, 2)(torch.zeros(1, 3, 8)), "conv1d of width 2 over 8 positions, which are"),
    "convolution, padded in front": (
        lambda: F.conv1d(F.pad(torch.zeros(1, 3, 8), (4, 0)), torch.zeros(3, 3, 3), dilation=2),
        "conv1d of width 3 over 12 positions, which are",
    ),
    "mask of own keys": (
        lambda: attend(attn_mask=torch.ones(8, 8, dtype=torch.bool)),
        r"has the shape \(8, 8\), and this rank's 8 queries .* must end in \(8, 24\), or \(1, 24\). Cut a whole mask",
    ),
    "causal and mask": (
        lambda: attend(attn_mask=torch.ones(8, 24, dtype=torch.bool), is_causal=True),
        "is_causal=True and attn_mask. Use one of them",
    ),
    "bias": (
        lambda: attend(attn_mask=causal_lower_right(8, 8)),
        "CausalBias, which knows nothing .* is_causal=True",
    ),
    "queries of none": (lambda: attend(queries=5), "attention of 5 queries to 8 keys, which are .* the queries are no"),
    "keys of none": (lambda: attend(keys=5, is_causal=True), "causal attention of 8 queries, this .* to 5 keys, which"),
    "reentrant": (
        lambda: checkpoint(lambda x: attend() + x, torch.zeros((), requires_grad=True), use_reentrant=True),
        "use_reentrant=True: in backward .* set device_parameters.activation_checkpointing",
    ),
    "varlen": (
        lambda: packed_attention_mask(torch.zeros(2, 8, dtype=torch.long), "varlen"),
        'kind="varlen"\\) has the queries and keys of one rank',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_would_see_one_ranks_positions_alone_is_refused(mistake: str) -> None:
    run, told = MISTAKES[mistake]
    with step(GatheredAttention(KnownParts(0, [])), 8), pytest.raises(StepError, match=told):
        run()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_is_compiled_is_refused_by_the_compiler_with_our_words() -> None:
    with (
        step(GatheredAttention(KnownParts(0, [])), 8),
        pytest.raises(Unsupported, match="torch.compile, or flex_"),
    ):
        flex_attention(*[torch.zeros(1, 2, 8, 16)] * 3)


def test_heads_that_ranks_cannot_divide_are_named() -> None:
    attention = UlyssesAttention(SequenceParts(0, RANKS, None, is_balanced=False))
    with (
        step(attention, 8),
        pytest.raises(ConfigError, match="context_parallel=3 gives .* 4 heads of queries and 4"),
    ):
        attend(is_causal=True)
    for shape in ((8, 3), (2, 1, 3, 8, 3)):
        with step(attention, 8), pytest.raises(StepError, match="whose heads it does not know"):
            F.scaled_dot_product_attention(*[torch.zeros(shape)] * 3)
    mask = torch.ones(4, 8, 24, dtype=torch.bool)
    with step(attention, 8), pytest.raises(StepError, match="one for each head, of which ranks have others"):
        attend(attn_mask=mask)


def test_what_mixes_positions_is_named_and_features_and_channels_are_not() -> None:
    told: list[str] = []
    with step(GatheredAttention(KnownParts(0, [])), 8, warn=lambda key, _: told.append(key)):
        x = torch.zeros(2, 8, 8)
        x.mean(-1), x.mean(), torch.mean(x, (0,)), x.cumsum(2), x[0].mean(-1), x.roll(1), torch.roll(x, 1, 0)
        F.conv1d(x[..., :5], torch.zeros(3, 8, 3)), F.conv1d(x, torch.zeros(3, 8, 1))
        assert not told
        x.mean(1), torch.mean(x, dim=(1, 2)), x.cumsum(-2), x.roll(1, 1), torch.roll(x, (1,), dims=(1,))
        x[..., 0].bool().cumsum(-1)
    assert [key.split()[0] for key in told] == ["mean", "mean", "cumsum", "roll", "roll", "cumsum"]


def test_other_ways_to_mix_positions_are_named() -> None:
    told: list[str] = []
    with step(GatheredAttention(KnownParts(0, [])), 8, warn=lambda key, _: told.append(key)):
        x, tokens = torch.zeros(2, 8, 4), torch.zeros(2, 8, dtype=torch.long)
        x.norm(), x.norm(dim=-1), x.var(-1), x.std(-1), x.diff(), F.pad(x, (1, 2)), torch.cat([x, x], 2)
        torch.linalg.vector_norm(x), torch.cat([x[:, :3], x[:, :4]], 1), torch.cat([x], 1), F.pad(x, (0, 0, 0, 0))
        assert not told
        x.norm(dim=1), torch.norm(x, 2, 1), torch.linalg.vector_norm(x, dim=1), torch.linalg.norm(x, 2, 1)
        x.var(1), torch.std(x, dim=1), x.diff(dim=1), torch.mean(x, axis=1)
        F.pad(x, (0, 0, 1, 0)), F.pad(tokens, (1, 0)), torch.cat([torch.zeros(2, 1, 4), x[:, :7]], dim=1)
    named = ["norm", "norm", "vector_norm", "norm", "var", "std", "diff", "mean", "pad", "pad", "cat"]
    assert [key.split()[0] for key in told] == named


def test_positions_counted_from_a_part_are_named_once_and_other_numbers_are_not() -> None:
    told: list[tuple[str, str]] = []
    with step(GatheredAttention(KnownParts(0, [])), 8, warn=lambda key, message: told.append((key, message))):
        assert torch.arange(7).tolist() == list(range(7))
        assert torch.arange(2, 8).tolist() == list(range(2, 8))
        assert torch.arange(0, 8, 2).tolist() == [0, 2, 4, 6]
        assert not told
        for numbers in (torch.arange(8), torch.arange(0, 8), torch.arange(end=8)):
            assert numbers.tolist() == list(range(8))
    assert len(told) == 3
    assert "as many as this rank has positions" in told[0][1]
