"""Attention in each way that models call it, on ranks that share sequences, gives what one process does."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from tests.api import AttentionTakeover, GatheredAttention, SequenceParts, UlyssesAttention
from tests.modules.test_context_attention import step
from tests.worlds import gloo_group, run_world

BATCH, HEADS, LENGTH, HEAD = 2, 4, 16, 3
ROWS, COLUMNS = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
PREFIX = (COLUMNS <= ROWS) | (COLUMNS < 5)
WINDOW = (COLUMNS <= ROWS) & (ROWS - COLUMNS < 5)
DISTANCE = -(ROWS - COLUMNS).abs().double()
SLOPES = torch.tensor([0.5, 0.2, 0.1, 0.05])[:, None, None]
PADDING = (torch.tensor([[LENGTH], [12]]) > COLUMNS)[:, None, None]

Cut = Callable[[Tensor], Tensor]
"""Of a mask, along its queries."""
attend = F.scaled_dot_product_attention


def by_heads(attend: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> Tensor:
    return attend(*(tensor.flatten(0, 1) for tensor in tensors), **options).unflatten(0, (BATCH, HEADS))


ANYWHERE: dict[str, Callable[[Tensor, Tensor, Tensor, Cut], Tensor]] = {
    "a prefix": lambda q, k, v, cut: attend(q, k, v, cut(PREFIX)),
    "a sliding window": lambda q, k, v, cut: attend(q, k, v, attn_mask=cut(WINDOW.expand(BATCH, 1, -1, -1))),
    "ALiBi of one slope": lambda q, k, v, cut: attend(q, k, v, cut(DISTANCE * 0.3)),
    "padded rows": lambda q, k, v, cut: attend(q, k, v, PADDING),
    "grouped": lambda q, k, v, cut: attend(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True, scale=0.2),
    "one head of keys": lambda q, k, v, cut: attend(q, *(x[:, :1].expand(-1, HEADS, -1, -1) for x in (k, v))),
    "one sequence of keys": lambda q, k, v, cut: attend(q, k[:1], v[:1], cut(PREFIX)),
    "wider values": lambda q, k, v, cut: attend(q, k, torch.cat([v, v], -1), is_causal=True)[..., :HEAD],
    "three dimensions": lambda q, k, v, cut: by_heads(attend, q, k, v, is_causal=True),
    "three dimensions, masked": lambda q, k, v, cut: by_heads(attend, q, k, v, attn_mask=cut(PREFIX[None])),
    "fixed keys": lambda q, k, v, cut: attend(q, k.detach(), v, is_causal=True),
}
GATHERED: dict[str, Callable[[Tensor, Tensor, Tensor, Cut], Tensor]] = {
    "ALiBi": lambda q, k, v, cut: attend(q, k, v, cut(DISTANCE * SLOPES)),
    "one head of keys, broadcast": lambda q, k, v, cut: attend(q, k[:, :1], v[:, :1], cut(PREFIX)),
    "five dimensions": lambda q, k, v, cut: attend(*(x.unflatten(1, (2, 2)) for x in (q, k, v))).flatten(1, 2),
    "two dimensions": lambda q, k, v, cut: torch.stack([attend(q[0, 0], k[0, 0], v[0, 0])] * 3)[None],
}


@gloo_group()
def observe() -> dict[str, dict[str, float]]:
    """By how much the outputs and gradients of each differ, under either way."""
    inputs = torch.randn(3, BATCH, HEADS, LENGTH, HEAD, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen: dict[str, dict[str, float]] = {}
    for way, is_balanced in ((GatheredAttention, True), (UlyssesAttention, False)):
        parts = SequenceParts(dist.get_rank(), 2, dist.group.WORLD, is_balanced=is_balanced)
        takeover = step(way(parts), LENGTH // 2)
        seen[way.__name__] = {}
        for name, run in (ANYWHERE | GATHERED if is_balanced else ANYWHERE).items():
            whole = [tensor.clone().requires_grad_() for tensor in inputs]
            expected = run(*whole, lambda mask: mask)
            expected.square().sum().backward()
            own = [parts.cut(tensor, -2).requires_grad_() for tensor in inputs]
            with takeover:
                found = run(*own, aside(takeover, parts))
                found.square().sum().backward()
            wanted = [expected.detach(), *(tensor.grad for tensor in whole)]
            pairs = zip([found, *(tensor.grad for tensor in own)], wanted, strict=True)
            differences = [(a - parts.cut(b, -2)).abs().max() for a, b in pairs if a is not None]
            seen[way.__name__][name] = float(max(differences))
    with takeover:
        join_positions()
    return seen


def join_positions() -> None:
    """As between layers that ranks share: nothing is told of it."""
    half = DTensor.from_local(torch.zeros(BATCH, LENGTH // 4, 5), DeviceMesh("cpu", [0, 1]), [Shard(1)])
    assert half.redistribute(placements=[Replicate()]).to_local().shape[1] == LENGTH // 2


def aside(takeover: AttentionTakeover, parts: SequenceParts) -> Cut:
    def cut(mask: Tensor) -> Tensor:
        with takeover.aside():
            return parts.cut(mask, -2)

    return cut


def test_each_ranks_queries_see_what_they_would_in_one_process() -> None:
    for seen in run_world(observe, 2):
        assert {name: sorted(of_way) for name, of_way in seen.items()} == {
            "GatheredAttention": sorted(ANYWHERE | GATHERED),
            "UlyssesAttention": sorted(ANYWHERE),
        }
        assert {f"{way}: {name}": worst for way in seen for name, worst in seen[way].items() if worst > 1e-12} == {}
