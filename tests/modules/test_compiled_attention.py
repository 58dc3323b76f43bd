"""Compiled blocks in a step whose sequences are shared: what could see one rank's positions alone is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests import api
from tests.modules.test_context_attention import step as step_of
from tests.operations import Operations

LENGTH = 8
HEADS = torch.randn(2, 4, LENGTH, 4, generator=torch.Generator().manual_seed(0))


class Runs(nn.Module):
    """Runs what it was given, with a layer of its own."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run, self.layer = run, nn.Linear(4, 4)

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.run(self, x, *others)


def compiled(run: Callable[..., Any], backend: str = "eager") -> nn.Module:
    torch._dynamo.reset()
    block = Runs(run)
    api.compile_with_shared_attention(block, backend=backend, mode=None)
    return block


def step(*lengths: int) -> api.AttentionTakeover:
    return step_of(api.GatheredAttention(api.SequenceParts(0, 2, None, is_balanced=True)), *lengths)


def attend(module: nn.Module, x: Tensor, *_: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Formula(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.aten.scaled_dot_product_attention(x, x, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "flex": (lambda _, x: flex_attention(x, x, x), (), "Use scaled_dot_product_attention, or packed_attention_mask"),
    "in a function of its own": (
        lambda block, x: Formula.apply(x * block.layer.bias[0]),
        (),
        "attention inside a torch.autograd.Function",
    ),
    "mask": (
        lambda _, x, mask: F.scaled_dot_product_attention(x, x, x, mask),
        (torch.ones(LENGTH, 2 * LENGTH, dtype=torch.bool),),
        "the compiler knows those of one: use packed_attention",
    ),
    "documents": (
        lambda _, x, documents: api.packed_attention(x, x, x, api.packed_attention_mask(documents)),
        (torch.zeros(2, LENGTH, dtype=torch.long),),
        "or make it with packed_attention_mask, outside compiled blocks",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_see_one_ranks_positions_alone_is_refused(what: str) -> None:
    run, args, told = REFUSED[what]
    with step(LENGTH), pytest.raises(api.StepError, match=told):
        compiled(run)(HEADS, *args)


def test_what_is_compiled_around_blocks_leaves_them_alone() -> None:
    block = compiled(attend)
    around = torch.compile(lambda x: block(x) * 1, backend="eager", fullgraph=True)
    with step(LENGTH), pytest.raises(torch._dynamo.exc.Unsupported, match="blocks are compiled by themselves"):
        around(HEADS)


def test_a_block_that_runs_uncompiled_attends_to_other_ranks_keys_too() -> None:
    block = compiled(attend)
    # There is no group to gather from.
    with step(LENGTH), torch.compiler.set_stance("force_eager"), pytest.raises(AttributeError):
        block(HEADS)
    with step(LENGTH), Operations(), pytest.raises(Exception, match="no attribute 'size'|no compiled frames"):
        block(HEADS)


def test_a_block_within_a_checkpoint_or_a_mode_of_ones_own_is_an_error() -> None:
    takeover, block = step(2 * LENGTH), compiled(attend, "aot_eager")
    with takeover, torch.device("cpu"), pytest.raises(api.StepError, match="its attention would not be taken over"):
        block(HEADS)
    x = HEADS.clone().requires_grad_()
    for _ in range(2):  # compiled by then, or not
        for is_reentrant in (True, False):
            with takeover:
                output = checkpoint(block, x, use_reentrant=is_reentrant)
            with pytest.raises(api.StepError, match="by torch.utils.checkpoint around it, in backward"):
                output.sum().backward()
        with takeover, torch.no_grad():
            block(x)


def test_whole_sequences_are_attended_to_as_they_are_and_lengths_do_not_share_what_was_compiled() -> None:
    block, expected = compiled(attend, "aot_eager"), attend(nn.Identity(), HEADS)
    assert api.is_compiled(block)
    torch.testing.assert_close(block(HEADS), expected)
    takeover = step(2 * LENGTH)  # an encoder's, say
    with takeover:
        torch.testing.assert_close(block(HEADS), expected)
    takeover.attention.lengths = {LENGTH}
    # There is no group to gather from.
    with takeover, pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="AttributeError"):
        block(HEADS)
    torch.testing.assert_close(block(HEADS), expected)


def test_a_mask_over_other_keys_is_refused_outside_of_steps_too() -> None:
    mask = torch.ones(LENGTH, 2 * LENGTH, dtype=torch.bool)
    with step(LENGTH), pytest.raises(Exception, match="AttributeError"):
        compiled(lambda _, x, mask: api.packed_attention(x, x, x, mask), "aot_eager")(HEADS, mask)
    with pytest.raises(api.StepError, match="shapes that do not fit"):
        compiled(lambda _, x, mask: api.packed_attention(x, x, x, mask))(HEADS, mask)


def test_outside_of_such_blocks_packed_attention_compiled_is_as_it_is_uncompiled() -> None:
    def run(mask: Tensor) -> Tensor:
        return api.packed_attention(HEADS, HEADS, HEADS, mask)

    rows = torch.rand(2, 1, LENGTH, 1) < 0.9  # one column for all keys
    torch.testing.assert_close(torch.compile(run, backend="eager")(rows), run(rows))
    for call in (run, torch.compile(run, backend="eager")):
        with pytest.raises(RuntimeError, match="must match the size|making fake tensor call"):
            call(torch.ones(2, 1, LENGTH, 2 * LENGTH, dtype=torch.bool))
