"""What parameters, gradients and optimizer state are expected to take, against what they take."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dream_trainer.callbacks import Memory, TrainerSummary
from dream_trainer.callbacks.memory_estimate import estimate, held_state_bytes, in_words, measured, state_bytes
from tests.callbacks.recording import LoggedSharded
from tests.trainer.small import BY_BLOCKS, Samples, make_config

MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "AdamW, slowly": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=False),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def true_bytes(tensors: Iterable[Tensor]) -> Counter[torch.dtype]:
    """Of this rank's parts, by PyTorch's public ways."""
    from torch.distributed.tensor import DTensor

    found: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found[tensor.dtype] += local.nbytes
    return found


class Weighed(LoggedSharded):
    """Notes what is expected before training, and what is there."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model[1].requires_grad_(False)
        self.model.register_buffer("table", torch.zeros(7, dtype=torch.int32))

    def pre_fit(self) -> None:
        self.expected = estimate(self)
        self.state_before = dict(self.optimizer.state)

    def post_optimizer_step(self, model: nn.Module, optimizer: Optimizer) -> None:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        state = [value for own in optimizer.state.values() for value in own.values() if value is not None]
        gradients = true_bytes(p.grad for p in model.parameters() if p.grad is not None)
        self.true = {"parameters": true_bytes(tensors), "gradients": gradients, "optimizer state": true_bytes(state)}
        self.found = measured(self, gradients)


def weigh(name: str) -> tuple[Any, Any, Any]:
    """Expected, measured and true bytes of a run over this process's world."""
    config = make_config(n_epochs=1, fsdp=BY_BLOCKS)
    with Weighed(config, DataLoader(Samples(4), 1), make_optimizer=MAKERS[name]) as trainer:
        trainer.fit()
        assert trainer.state_before == {}
    return trainer.expected, trainer.found, trainer.true


def weigh_all() -> dict[str, tuple[Any, Any, Any]]:
    return {name: weigh(name) for name in MAKERS}


def assert_equal(found: dict[str, tuple[Any, Any, Any]]) -> None:
    for expected, seen, true in found.values():
        assert expected == seen == true


def test_what_is_expected_is_what_is_there() -> None:
    found = weigh_all()
    assert_equal(found)
    eight = torch.float64
    # Twice a 3 x 3 matrix and 3 biases are trained; 3 weights and a bias are not.
    assert found["SGD"][0] == {
        "parameters": Counter({eight: 28 * 8, torch.int32: 7 * 4}),
        "gradients": Counter({eight: 24 * 8}),
        "optimizer state": Counter(),
    }
    assert found["SGD with momentum"][0]["optimizer state"] == Counter({eight: 24 * 8})
    assert found["AdamW"][0]["optimizer state"] == Counter({eight: 2 * 24 * 8, torch.float32: 4 * 4})


def test_groups_of_options_are_told_apart_and_state_that_is_there_is_counted() -> None:
    layers = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).bfloat16()
    groups = [{"params": layers[0].weight, "momentum": 0.9}, {"params": [one.weight for one in layers[1:]]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert state_bytes([optimizer]) == Counter({torch.float32: 64})
    adagrad = torch.optim.Adagrad(layers[1].parameters(), lr=0.1)  # which makes its state at once
    assert state_bytes([optimizer, adagrad]) == Counter({torch.float32: 64 + 64 + 4})


class Unlike(torch.optim.SGD):
    """Not PyTorch's: its step might communicate."""


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.LBFGS, Unlike])
def test_what_cannot_be_told_is_unknown_and_leaves_the_optimizer_as_it_is(cls: type[Optimizer]) -> None:
    layer = nn.Linear(4, 4)
    optimizer = cls(layer.parameters(), lr=0.1)
    assert state_bytes([torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), optimizer]) is None
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == list(layer.parameters())
    assert in_words(None) == "unknown"


def test_bytes_are_spelled_by_dtype_the_largest_first() -> None:
    assert (
        in_words(Counter({torch.bfloat16: 10, torch.float32: 2048, torch.int8: 0})) == "2.00 KiB float32, 10 B bfloat16"
    )
    assert in_words(Counter()) == "none"


def test_memory_prints_both_once_when_all_optimizers_have_stepped_twice(capsys: pytest.CaptureFixture[str]) -> None:
    class InTurns(Weighed):
        def configure_optimizers(self) -> None:
            first, second = self.model[0]
            self.first = torch.optim.AdamW(first.parameters(), fused=True)
            self.second = torch.optim.Adafactor(second.parameters())

        pre_fit = post_optimizer_step = lambda self, *_: None

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            optimizer = self.second if batch_idx % 2 else self.first
            self.backward(sum(p.square().sum() for group in optimizer.param_groups for p in group["params"]))
            self.step(self.model, optimizer)
            return {}

    with InTurns(make_config(n_epochs=1, callbacks=[Memory()]), DataLoader(Samples(6), 1)) as trainer:
        trainer.fit()
        state = held_state_bytes(trainer.first) + held_state_bytes(trainer.second)
    title, header, *rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert title == ["memory of rank 0 by step 4"]
    assert header == ["part", "expected", "measured"]
    assert rows == [
        ["parameters", *["224 B float64, 28 B int32"] * 2],
        ["gradients", *["192 B float64"] * 2],
        ["optimizer state", "unknown", in_words(state)],
    ]


def test_the_summary_says_what_is_expected() -> None:
    file = io.StringIO()
    config = make_config(n_epochs=1, callbacks=[TrainerSummary(file=file)])
    with Weighed(config, DataLoader(Samples(2), 1)) as trainer:
        trainer.fit()
    [line] = [line for line in file.getvalue().splitlines() if line.strip().startswith("memory")]
    assert re.split(r"  +", line.strip()) == [
        "memory of rank 0",
        "parameters 224 B float64, 28 B int32 + gradients 192 B float64 + optimizer state 192 B float64",
    ]
