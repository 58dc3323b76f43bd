"""What sees this rank's positions alone is refused or named, and models that are right hear nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from dream_trainer.data.packing.attention_mask import packed_attention, packed_attention_mask
from dream_trainer.data.packing.packed_rows import handlers
from dream_trainer.errors import StepError
from dream_trainer.modules.attention_takeover import AttentionTakeover
from dream_trainer.modules.context_attention import GatheredAttention
from dream_trainer.modules.mixture_of_experts import MoE
from dream_trainer.modules.sequence_parts import SequenceParts
from dream_trainer.nested import concatenated
from examples.llama.model import Llama, LlamaConfig

PART, RANKS, HEADS, HEAD = 12, 2, 4, 6
WIDTH = HEADS * HEAD


class AlikeParts(SequenceParts):
    """In place of a collective: all ranks have this one's part."""

    def __init__(self) -> None:
        super().__init__(0, RANKS, None, is_balanced=True)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        return torch.cat([part] * RANKS, dim)

    def sum_of_own(self, whole: Tensor, dim: int) -> Tensor:
        return self.cut(whole, dim) * RANKS


def told_in_a_step(run: Callable[[], Any], length: int = PART) -> list[str]:
    """The keys of warnings."""
    told: list[str] = []
    attention = GatheredAttention(AlikeParts())
    attention.lengths = {length}
    with AttentionTakeover(
        attention, handlers, lambda key, _: told.append(key.removesuffix(" under context_parallel"))
    ):
        run()
    return told


def projected(x: Tensor, count: int = 3, heads: int = HEADS) -> list[Tensor]:
    """`count` of `[batch, heads, length, HEAD]`, with gradients."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(x.shape[-1], count * heads * HEAD, generator=generator, requires_grad=True)
    return [one.unflatten(-1, (heads, HEAD)).transpose(1, 2) for one in (x @ weight).chunk(count, -1)]


def values(length: int = PART, width: int = WIDTH) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(0), requires_grad=True)


class Again(torch.autograd.Function):
    """Attention that backward computes again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            attended = F.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(attended, (q, k, v), gradients)


class Fresh(torch.autograd.Function):
    """Without a context in forward."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = Again.backward


class PackedAgain(Again):
    """The same of packed rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_in_rows(q, k, v)


def attend_in_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return packed_attention(q, k, v, packed_attention_mask(torch.zeros(2, PART, dtype=torch.long)))


def test_every_name_of_attention_goes_to_ours() -> None:
    attention, (q, k, v) = GatheredAttention(AlikeParts()), projected(values())
    attention.lengths = {PART}
    packet = torch.ops.aten.scaled_dot_product_attention
    with AttentionTakeover(attention, handlers, print):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for attend in (torch._C._nn.scaled_dot_product_attention, packet, packet.default):
            for _ in range(2):
                assert torch.equal(attend(q, k, v, is_causal=True), expected)
    assert not torch.allclose(packet(q, k, v, is_causal=True), expected)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "kernel": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*projected(values())),
        "aten._scaled_dot_product_flash_attention_for_cpu attends within this",
    ),
    "kernel of torch": (
        lambda: torch._C._VariableFunctions._scaled_dot_product_attention_math(*projected(values())),
        "_scaled_dot_product_attention_math attends within this rank's part",
    ),
    "function": (lambda: Again.apply(*projected(values())), "inside the forward of Again, a torch.autograd.Function"),
    "function without a context": (lambda: Fresh.apply(*projected(values())), "inside the forward of Fresh, a torch"),
    "function of packed rows": (lambda: PackedAgain.apply(*projected(values())), "inside the forward of PackedAgain"),
    "checkpoint of packed rows": (
        lambda: checkpoint(attend_in_rows, *projected(values()), use_reentrant=True),
        "use_reentrant=True: in backward",
    ),
    "softmax of three dimensions": (
        lambda: torch.softmax(torch.zeros(8, PART, PART), -1),
        r"softmax over scores of the shape \(8, 12, 12\).*logits.flatten\(0, 1\)",
    ),
    "softmax by keywords": (lambda: torch.softmax(dim=-1, input=torch.zeros(8, PART, PART)), "softmax over scores"),
    "special": (lambda: torch.special.softmax(torch.zeros(2, 4, PART, PART), -1), "softmax over scores of the shape"),
    "minimum": (lambda: F.softmin(torch.zeros(2, 4, PART, PART), -1), "softmax over scores of the shape"),
    "drawn": (lambda: F.gumbel_softmax(torch.zeros(8, PART, PART), dim=-1), "softmax over scores of the shape"),
    "logarithm": (lambda: torch.zeros(2, 4, PART, PART).log_softmax(-1), "softmax over scores of the shape"),
    "operator": (lambda: torch.ops.aten._softmax(torch.zeros(8, PART, PART), -1, False), "softmax over scores"),
    "LSTM": (lambda: nn.LSTM(WIDTH, 4, batch_first=True)(values()), "a recurrent layer .* over 12 positions"),
    "GRU, time first": (lambda: nn.GRU(WIDTH, 4)(values().mT.reshape(PART, 2, WIDTH)), "a recurrent layer"),
    "RNN, packed": (
        lambda: nn.RNN(3, 4)(pack_sequence([torch.zeros(PART, 3), torch.zeros(5, 3)])),
        "a recurrent layer",
    ),
    "trace": (
        lambda: torch.jit.trace(lambda x: F.scaled_dot_product_attention(x, x, x), (projected(values())[0].detach(),)),
        "within torch.jit.trace",
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_sees_a_part_alone_for_certain_is_refused(case: str) -> None:
    run, told = REFUSED[case]
    run()
    with pytest.raises(StepError, match=told):
        told_in_a_step(run)


@torch.library.custom_op("dream_trainer_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Opaque."""
    return x * 2


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([(chunk @ k.mT).softmax(-1) @ v for chunk in q.split(5, -2)], -2)


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.baddbmm(torch.zeros(()), (q @ k.mT).log_softmax(-1).exp(), v)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    return torch.einsum("... i j, ... j d -> ... i d", scores, v)


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (torch.cat([torch.zeros(2, HEADS, 1, HEAD), one], -2) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def with_a_class_token(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*projected(torch.cat([torch.zeros(2, 1, WIDTH), x], 1)))


def to_memories(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    memories = torch.ones(2, HEADS, 3, HEAD)
    weights = torch.cat([q @ memories.mT, q @ k.mT], -1).softmax(-1)
    return weights[..., :3] @ memories


def to_joined_memories(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ torch.cat([torch.ones(2, HEADS, 3, HEAD), k], 2).mT).softmax(-1)


def in_segments(x: Tensor) -> Tensor:
    segments = torch.zeros(PART, dtype=torch.long)
    sums = torch.zeros(2, 5, WIDTH).index_add(1, segments, x)
    return sums.scatter_add(1, segments[None, :, None].expand_as(x), x)


def in_a_text(x: Tensor) -> Tensor:
    return x.masked_scatter(torch.ones(2, PART, 1, dtype=torch.bool), torch.zeros(100, WIDTH))


def of_pooled_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, *(one.unflatten(-2, (-1, 2)).mean(-2) for one in (k, v)))


def in_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.unflatten(-2, (-1, 4)).transpose(1, 2).flatten(0, 1) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)


NAMED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "operator": (lambda: doubled(values()), ["dream_trainer_tests::doubled"]),
    "packet": (lambda: torch.ops.dream_trainer_tests.doubled(values()), ["dream_trainer_tests::doubled"]),
    "exponentials": (lambda: by_hand(*projected(values())), ["matmul of pairs", "matmul"]),
    "chunks": (lambda: in_chunks(*projected(values())), ["matmul"] * 3 + ["cat"]),
    "baddbmm": (lambda: by_bmm(*projected(values())), ["matmul of pairs", "baddbmm"]),
    "einsum": (
        lambda: by_einsum(*projected(values())),
        ["einsum('bhid,bhjd->bhij') of pairs", "einsum('... i j, ... j d -> ... i d')"],
    ),
    "linear attention": (lambda: (lambda q, k, v: q @ (k.mT @ v))(*projected(values())), ["matmul"]),
    "a matrix over positions": (lambda: nn.Parameter(torch.zeros(PART, PART)) @ values(), ["matmul"]),
    "a sum": (lambda: torch.einsum("btd,td->bd", values(), torch.ones(PART, WIDTH)), ["einsum('btd,td->bd')"]),
    "sinks": (lambda: with_sinks(*projected(values())), ["cat"] * 2 + ["keys of another length"]),
    "a class token": (lambda: with_a_class_token(values()), ["cat", "keys of another length"]),
    "pairs by as many features": (lambda: values(width=PART) @ values(width=PART).mT, ["matmul of pairs"]),
    "own attention to memories": (lambda: to_memories(*projected(values())), ["matmul of pairs"]),
    "own attention to joined memories": (lambda: to_joined_memories(*projected(values())), ["cat"]),
    "pooled keys": (lambda: of_pooled_keys(*projected(values())), ["keys of another length"]),
    "windows": (lambda: in_windows(*projected(values())), ["keys of another length"]),
    "neighbours": (lambda: values()[:, 1:] - values()[:, :-1], ["a slice"] * 2),
    "neighbours in heads": (lambda: projected(values())[0][..., 1:, :], ["a slice"]),
    "shifted labels": (lambda: torch.zeros(2, PART, dtype=torch.long)[..., 1:], ["a slice"]),
    "every other": (lambda: values()[:, ::2], ["a slice"]),
    "the last": (lambda: values()[:, -1], ["a slice"]),
    "a table": (lambda: nn.Parameter(torch.zeros(64, WIDTH))[:PART], ["the first values"]),
    "a buffer": (lambda: torch.zeros(1, 64, WIDTH)[:, :PART], ["the first values"]),
    "a mask": (lambda: torch.ones(1, 1, 64, 64)[:, :, :PART, :PART], ["the first values"]),
    "where it ends": (lambda: torch.zeros(2, PART, dtype=torch.long).eq(0).int().argmax(1), ["argmax"]),
    "a norm of positions": (lambda: F.normalize(values(), dim=1), ["normalize"]),
    "a loop over time": (lambda: values().unbind(1), ["unbind"]),
    "sums and extremes": (lambda: (values().sum(1), values().amax((1, 2)), values().max(1)), ["sum", "amax", "max"]),
    "chosen tokens": (lambda: (values().topk(3, 1), values().sort(dim=1)), ["topk", "sort"]),
    "fourier": (lambda: torch.fft.fft(torch.fft.fft(values()), dim=1), ["fft_fft"]),
    "pooling": (lambda: F.avg_pool1d(values().mT, 2), ["a pooling, norm or interpolation"]),
    "norm of groups": (lambda: F.group_norm(values().mT, 2), ["a pooling, norm or interpolation"]),
    "the last token of each": (lambda: values()[torch.arange(2), torch.tensor([3, 5])], ["an index"]),
    "masked positions": (lambda: values().gather(1, torch.zeros(2, 3, WIDTH, dtype=torch.long)), ["gather"]),
    "a narrow piece": (lambda: values().narrow(1, 1, PART - 1).index_select(0, torch.tensor([1])), ["narrow"]),
    "segments": (lambda: in_segments(values()), ["an index"] * 2),
    "a token put first": (lambda: values().detach().__setitem__((slice(None), 0), 0.0), ["a slice"]),
    "an image in a text": (lambda: in_a_text(values()), ["masked_scatter"]),
    "a norm of both": (lambda: F.layer_norm(values(), (PART, WIDTH)), ["a norm"]),
    "counting from one": (lambda: (torch.arange(1, PART + 1), torch.linspace(0, 1, PART)), ["arange", "linspace"]),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH)(values().mT), ["batch_norm"]),
    "images": (lambda: F.conv2d(values()[:, None], torch.zeros(1, 1, 3, 3), padding=1), ["conv2d"]),
    "distances": (lambda: torch.cdist(values(), values()), ["cdist"]),
    "operators of aten": (lambda: torch.ops.aten.cumsum(values(), 1), ["cumsum"]),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_what_may_see_a_part_alone_is_named(case: str) -> None:
    run, keys = NAMED[case]
    assert told_in_a_step(run) == keys


def llama() -> None:
    model = Llama(LlamaConfig(vocab_size=32, dim=WIDTH, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=32))
    tokens = torch.zeros(2, PART, dtype=torch.long)
    model(tokens, torch.arange(3, PART + 3)).logsumexp(-1).square().mean().backward()


def rotated(x: Tensor) -> Tensor:
    angles = torch.ones(PART, HEAD // 2)
    one, two = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    turned = torch.cat((one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()), -1)
    pairs = torch.stack((turned[..., ::2], turned[..., 1::2]), -1)
    return pairs.flatten(-2)


def language_model() -> None:
    x = values()
    q, k, v = projected(F.rms_norm(x, (WIDTH,)))
    attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + attended.transpose(1, 2).reshape(2, PART, WIDTH) @ nn.Parameter(torch.zeros(WIDTH, WIDTH)).T
    x = x * (x.pow(2).mean(-1, keepdim=True) + 1).rsqrt()
    scores = x @ nn.Parameter(torch.zeros(32, WIDTH)).mT
    labels = torch.zeros(2, PART, dtype=torch.long)
    chunks = [(scores[:, at : at + 4], labels[:, at : at + 4]) for at in range(0, PART, 4)]
    loss = sum(F.cross_entropy(some.flatten(0, 1), wanted.flatten()) for some, wanted in chunks)
    each = F.cross_entropy(scores.mT, labels, reduction="none") * (labels != -100)
    (loss + each.sum() + scores.logsumexp(-1).square().mean() + scores.softmax(-1).sum(-1).mean()).backward()


def grouped() -> None:
    (q,), (k, v) = projected(values(), 1), projected(values(), 2, heads=1)
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True, dropout_p=0.5, scale=0.3)


def packed() -> None:
    packed_attention(*projected(values()), packed_attention_mask(torch.zeros(2, PART, dtype=torch.long)))


def experts() -> None:
    torch.manual_seed(0)
    for count in (4, PART):
        MoE(WIDTH, 32, n_experts=count, top_k=2)(values()).sum().backward()
    concatenated([values()[:1] for _ in range(PART)], lambda *_: pytest.fail("alike"))


def one_hot_experts() -> None:
    tokens = values(width=WIDTH).flatten(0, 1)
    gates = F.one_hot(torch.arange(2 * PART) % 4, 4).float()
    gates.mean(0) * tokens.new_ones(2 * PART, 4).sum(0)
    torch.einsum("te,td->ed", gates, tokens)
    torch.bmm(tokens.expand(4, -1, -1), nn.Parameter(torch.zeros(4, WIDTH, PART))) @ nn.Parameter(
        torch.zeros(4, PART, 3)
    )


def encoder(length: int) -> Tensor:
    x = torch.cat([torch.zeros(2, 1, WIDTH), values(length - 1)], 1)
    q, k, v = projected(x)
    x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return x[:, 1:].mean(1, keepdim=True) + x


def cross_attention() -> None:
    """To encoders' keys, some of whose lengths the part is a multiple of, or a few more than it."""
    for length in (4, 6, PART + 3, 2 * PART, 31):
        (q,), (k, v) = projected(values(), 1), projected(encoder(length), 2)
        F.scaled_dot_product_attention(q, k, v)


def among_each_positions_own() -> None:
    """Attention of several variables at each position."""
    q, k, v = projected(torch.randn(2 * PART, 3, WIDTH, requires_grad=True))
    F.scaled_dot_product_attention(q, k, v)
    x = values()[..., None].expand(-1, -1, -1, 4).transpose(2, 3)
    for each in (x, x.flatten(0, 1)):
        F.scaled_dot_product_attention(each, each, each)


def by_features_as_many() -> None:
    """Products over as many features as there are positions."""
    x, weight = values(width=PART), nn.Parameter(torch.zeros(PART, PART))
    x @ weight, x @ weight.T, F.linear(x, weight), torch.einsum("btd,de->bte", x, weight)
    experts = nn.Parameter(torch.zeros(2, PART, PART))
    torch.einsum("btd,btd->", x, x), x @ experts, torch.einsum("btd,bde->bte", x, experts), x[()], x[x > 0]


def of_operators() -> None:
    x = values()
    torch.ops.aten.mul(x, x), torch.ops.aten.add.Tensor(x, x), doubled(torch.zeros(5)), x[0], x[:, None], x[:, :, 1:]


def test_masks_of_transformers_are_looked_at_where_attention_has_them() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    positions = torch.arange(3, PART + 3).expand(2, -1)

    def differences() -> None:
        torch.diff(positions, dim=-1)

    assert told_in_a_step(lambda: masks.find_packed_sequence_indices(positions)) == []
    assert told_in_a_step(differences) == ["diff"]


def test_masks_that_transformers_makes_for_a_part_are_refused() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    from transformers import LlamaConfig

    config, x = LlamaConfig(attn_implementation="sdpa"), torch.zeros(2, PART, 4)
    positions = torch.arange(PART, 2 * PART).expand(2, -1)

    def mask(columns: int | None, of: Tensor) -> Any:
        given = None if columns is None else (torch.arange(columns) > 0).expand(2, -1)
        return masks.create_causal_mask(
            config=config, inputs_embeds=x, attention_mask=given, past_key_values=None, position_ids=of
        )

    assert told_in_a_step(lambda: mask(None, positions)) == []
    jumping = torch.cat((positions[:, :3] - PART, positions[:, 3:]), 1)
    for columns, of in ((3 * PART, positions), (PART, positions), (None, jumping)):
        with pytest.raises(StepError, match="of transformers makes a mask for .* as if they were the first: it was"):
            told_in_a_step(lambda columns=columns, of=of: mask(columns, of))


RIGHT = (llama, language_model, grouped, packed, experts, one_hot_experts, cross_attention, among_each_positions_own)


@pytest.mark.parametrize("model", [*RIGHT, by_features_as_many, of_operators], ids=lambda model: model.__name__)
def test_models_that_are_right_hear_nothing(model: Callable[[], None]) -> None:
    assert told_in_a_step(model) == []


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_function_without_a_backward_attends_over_all_positions() -> None:
    def run() -> None:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                Again.apply(*projected(values()))
                Again.apply(*(nn.Parameter(one) for one in projected(values())))
                checkpoint(F.scaled_dot_product_attention, *projected(values()), use_reentrant=True)

    assert told_in_a_step(run) == []


def test_each_function_is_looked_at_once() -> None:
    looked: list[Any] = []

    class Looking(AttentionTakeover):
        def _first_seen(self, function: Any) -> Any:
            looked.append(function)
            return super()._first_seen(function)

    attention = GatheredAttention(AlikeParts())
    attention.lengths = {PART}
    with Looking(attention, handlers, print):
        for _ in range(3):
            torch.ops.aten.mul(torch.ones(3), 2)
            torch.ones(3).abs()
    assert len(looked) == len(set(looked)) == 3
