"""In a step whose sequences are shared by ranks, numbers are alike on these ranks unless they are of positions."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests import api

ROWS, PART, WIDTH = 8, 4, 6
ops = torch.ops.aten


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


OF_SEQUENCES: dict[str, Callable[[], Any]] = {
    "one number": lambda: torch.rand(()),
    "a sample's": lambda: torch.rand(ROWS),
    "a sample's, to multiply": lambda: torch.empty(ROWS, 1, 1).bernoulli_(0.5),
    "a micro-batch's": lambda: torch.rand(ROWS // 2),
    "like": lambda: torch.randn_like(torch.zeros(ROWS, WIDTH)),
    "an order": lambda: torch.randperm(WIDTH),
    "dropout": lambda: F.dropout(torch.ones(ROWS, WIDTH)),
    "dropout of an encoder": lambda: nn.Dropout(0.5)(torch.ones(ROWS, PART + 1, WIDTH)),
    "one of each row": lambda: torch.multinomial(torch.ones(ROWS, PART), 1),
    "an operation": lambda: ops.rand.default([ROWS]),
    "out of place": lambda: torch.rand(ROWS, out=torch.empty(ROWS)),
    "a distribution's": lambda: torch.distributions.Gamma(torch.ones(ROWS), torch.ones(ROWS)).sample(),
    "a weight's": lambda: torch.randn_like(nn.Parameter(torch.zeros(PART, PART))),
    "choices": lambda: F.gumbel_softmax(torch.zeros(ROWS, WIDTH)),
    "channels of positions": lambda: F.dropout1d(torch.ones(ROWS, WIDTH, PART)),
    "channels of images": lambda: nn.Dropout2d(0.5)(torch.ones(ROWS, WIDTH, PART, PART)),
    "Python's": random.random,
    "numpy's": np.random.rand,
}
OF_POSITIONS: dict[str, Callable[[], Any]] = {
    "each": lambda: torch.rand(ROWS, PART),
    "each of a batch in one dimension": lambda: torch.randn(ROWS * PART, WIDTH),
    "like": lambda: torch.rand_like(torch.zeros(ROWS, PART)),
    "dropout": lambda: F.dropout(torch.ones(ROWS, PART, WIDTH)),
    "dropout of a module": lambda: nn.Dropout(0.5)(torch.ones(ROWS, PART, WIDTH)),
    "one of each": lambda: torch.multinomial(torch.ones(ROWS * PART, WIDTH), 1),
    "choices": lambda: F.gumbel_softmax(torch.zeros(ROWS, PART, WIDTH)),
    "positions whole": lambda: F.dropout1d(torch.ones(ROWS, PART, WIDTH)),
}


class InAStep:
    """A rank's step, with generators as a trainer has them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        attention = api.GatheredAttention(api.SequenceParts(rank, 2, None, is_balanced=True))
        attention.lengths = {PART}
        attention.shapes.add(torch.empty(ROWS, PART), 1, PART, PART // 2)
        self.takeover = api.AttentionTakeover(attention, api.handlers, lambda _, text: pytest.fail(text))

    def run(self, draw: Callable[[], Any]) -> Any:
        with api.preserved_random_state():
            torch.manual_seed(self.rank)
            api.seed_for_sequence(5)
            with self.takeover:
                return draw()


def on_both(draw: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    first, second = (torch.as_tensor(InAStep(rank).run(draw)) for rank in range(2))
    return first, second


@pytest.mark.parametrize("what", OF_SEQUENCES)
def test_what_is_of_a_whole_sequence_is_the_same_on_all_its_ranks(what: str) -> None:
    first, second = on_both(lambda: torch.stack([torch.as_tensor(OF_SEQUENCES[what]()) for _ in range(3)]))
    assert torch.equal(first, second)
    assert not (torch.equal(first[0], first[1]) and torch.equal(first[1], first[2]))


@pytest.mark.parametrize("what", OF_POSITIONS)
def test_what_is_of_positions_is_each_ranks_own(what: str) -> None:
    first, second = on_both(OF_POSITIONS[what])
    assert not torch.equal(first, second)


def test_a_generator_of_ones_own_is_left_alone() -> None:
    def draw() -> Tensor:
        return torch.rand(ROWS, generator=torch.Generator().manual_seed(7))

    assert torch.equal(InAStep(0).run(draw), draw())


class Skipping(nn.Module):
    """Leaves itself out, as a number of torch's or of Python's says."""

    def __init__(self, of_python: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.double)
        self.of_python = of_python
        self.skipped: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.skipped.append((random.random() if self.of_python else float(torch.rand(()))) < 0.5)
        return x if self.skipped[-1] else F.dropout(torch.tanh(self.linear(x)))


@pytest.mark.parametrize("of_python", [False, True])
def test_a_block_that_is_computed_again_draws_what_it_drew(of_python: bool) -> None:
    def gradients(keep: list[str] | None) -> tuple[Tensor, list[bool]]:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Skipping(of_python) for _ in range(6)))
        for block in blocks:
            if keep is not None:
                api.recompute(block, keep)
        x = torch.randn(ROWS, PART, WIDTH, dtype=torch.double, requires_grad=True)
        blocks(x).square().sum().backward()
        return torch.cat([x.grad.flatten(), torch.tensor([random.random()])]), [block.skipped[0] for block in blocks]

    plain, skipped = InAStep(0).run(lambda: gradients(None))
    assert len(set(skipped)) == 2
    for keep in ([], ["aten.mm.default"]):
        again, skipped_then = InAStep(0).run(lambda keep=keep: gradients(keep))
        assert torch.equal(plain, again)
        assert skipped_then == skipped


@pytest.mark.parametrize("first", range(4))
def test_pythons_numbers_are_drawn_again_where_no_ranks_share_sequences(first: int) -> None:
    def gradient(is_recomputed: bool) -> Tensor:
        blocks = [Skipping(of_python=True) for _ in range(4)]
        for seed, block in enumerate(blocks):
            torch.manual_seed(seed)
            block.linear.reset_parameters()
            if is_recomputed:
                api.recompute(block)
        x = torch.ones(2, WIDTH, dtype=torch.double, requires_grad=True)
        random.seed(first)
        torch.manual_seed(9)
        nn.Sequential(*blocks)(x).sum().backward()
        assert x.grad is not None
        return x.grad

    with api.preserved_random_state():
        assert torch.equal(gradient(False), gradient(True))


def scaled(x: Tensor) -> Tensor:
    return x * torch.rand(())


def test_inside_a_checkpoint_of_ones_own_what_is_alike_is_refused_and_dropout_of_positions_is_right() -> None:
    step = InAStep(0)
    x = torch.ones(ROWS, PART, WIDTH, requires_grad=True)
    refused = r"rand draws random numbers that are of no positions.*activation_checkpoint"
    for is_reentrant in (True, False):
        with pytest.raises(api.StepError, match=refused):
            step.run(lambda again=is_reentrant: checkpoint(scaled, x, use_reentrant=again))

    def dropped() -> tuple[Tensor, Tensor]:
        y = checkpoint(lambda x: F.dropout(x).sin(), x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return y, gradient

    y, gradient = step.run(dropped)
    assert torch.equal(y == 0, gradient == 0)


def test_inside_a_checkpoint_of_ones_own_in_or_around_a_recomputed_block_what_is_alike_is_refused() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scaled(x)

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(scaled, x, use_reentrant=False)  # type: ignore[no-any-return]

    class OnTheHost(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return scaled(x)

    inner, outer, x = Scaled(), Checkpointed(), torch.ones(ROWS, PART, WIDTH, requires_grad=True)
    kept = OnTheHost()
    api.recompute(kept)
    assert InAStep(0).run(lambda: kept(x)).requires_grad
    api.recompute(inner)
    api.recompute(outer)
    for refused in (outer, lambda x: checkpoint(inner, x, use_reentrant=False)):
        with pytest.raises(api.StepError, match="of no positions"):
            InAStep(0).run(lambda run=refused: run(x))


def test_a_layer_whose_input_is_cut_has_dropout_of_its_own_and_skips_like_the_other_ranks_of_a_sequence() -> None:
    class Mesh:
        def get_local_rank(self) -> int:
            return 1

    def drawn() -> tuple[Tensor, Tensor]:
        from torch.distributed.tensor import Shard

        class Layer(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                return F.dropout(x), torch.tensor([random.random(), float(torch.rand(())), np.random.rand()])

        layer = Layer()
        api.declare_random_layer(layer, Mesh(), Shard(-1))  # type: ignore[arg-type]
        return layer(torch.ones(ROWS, PART, WIDTH))

    (kept, skips), (other_kept, other_skips) = (InAStep(rank).run(drawn) for rank in range(2))
    assert torch.equal(skips, other_skips)
    assert not torch.equal(kept, other_kept)


def test_all_operations_that_draw_are_known() -> None:
    """By PyTorch's own mark of them, and by their taking a generator."""
    names = {
        schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas() if "aten::" in schema.name
    }
    of_kernels = "attention", "attn", "sdp", "mem_eff", "nested", "cudnn", "miopen", "mps", "functional", "no_grad"
    unknown = set()
    for name in names:
        packet = getattr(ops, name, None)
        overloads = [getattr(packet, one) for one in packet.overloads()] if packet is not None else []
        takes = any(argument.name == "generator" for one in overloads for argument in one._schema.arguments)
        marked = any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)
        bare = name.strip("_")
        if (takes or marked) and not api.is_draw(bare) and not any(k in bare for k in of_kernels):
            unknown.add(bare)
    assert unknown == {"gru", "lstm", "rnn_relu", "rnn_tanh", "fused_dropout"}  # refused; and CUDA's, inside dropout
