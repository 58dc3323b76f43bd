"""Hooks on the gradients of parameters act as if gradients were changed between backward and step, or are refused."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.trainer.arithmetic import same_bits
from tests.trainer.meshes import Case, Model, Trained, config_of
from tests.trainer.small import errors_of
from tests.trainer.stages import united, weights_of
from tests.worlds import run_world

FACTORS = {"embedding.weight": 0.0, "blocks.0.up.weight": 3.0, "head.bias": 0.5}
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
STEPS = 3


def case(**options: Any) -> Case:
    return Case(**({"steps": STEPS, "blocks": 4} | options))


class Scaled(Trained):
    """Scales gradients, where and as `way` says."""

    way = ""

    def set_hooks(self, where: str) -> None:
        if not self.way.startswith(where):
            return
        for name, parameter in self.model.named_parameters():
            if name in FACTORS:
                set_hook(parameter, self.way.split()[1], FACTORS[name])

    def configure_models(self) -> None:
        super().configure_models()
        self.set_hooks("configure_models")

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.set_hooks("configure_optimizers")

    def loss(self, model: Model, batch: tuple[Tensor, ...]) -> Tensor:
        loss = super().loss(model, batch)
        if self.way == "by hand" and self.training:
            for name, parameter in self.model.named_parameters():
                if name in FACTORS:
                    assert parameter.grad is not None
                    parameter.grad.mul_(FACTORS[name])
        return loss


def set_hook(parameter: nn.Parameter, kind: str, factor: float) -> None:
    if kind == "register_hook":
        parameter.register_hook(lambda gradient: gradient * factor)
    else:
        parameter.register_post_accumulate_grad_hook(lambda parameter: scale(parameter, factor))


def scale(parameter: Tensor, factor: float) -> None:
    with torch.no_grad():
        parameter.grad *= factor  # one batch in a window, and of a pipeline with one micro-batch on its way


def train(items: list[tuple[str, Case]]) -> list[tuple[dict[str, Tensor], list[float]]]:
    results = []
    for way, case in items:
        Scaled.way = way
        config = replace(config_of(case), fsdp_parameters=dt.FSDPParameters())  # models whole in steps keep hooks
        with Scaled(config) as trainer:
            trainer.fit()
            results.append((weights_of(trainer), trainer.norms))
    return results


def test_they_act_on_every_mesh_as_changes_by_hand() -> None:
    before, after = "configure_models register_hook", "configure_optimizers register_hook"
    accumulated = "configure_optimizers register_post_accumulate_grad_hook"
    early = "configure_models register_post_accumulate_grad_hook"
    alone = [("by hand", case()), *((way, case()) for way in (before, after, accumulated, early))]
    ((expected, norms), *others) = run_world(train, 1, alone)[0]
    for weights, found in others:
        assert found == norms
        assert same_bits(weights, expected)
    items = [
        (before, case(dp=2, shard=2)),
        (before, case(pp=2, schedule="ZBVZeroBubble")),
        (after, case(cp=2)),
        (after, case(pp=2)),
        (early, case(dp=2)),
        (accumulated, case(dp=2, shard=2)),
        (accumulated, case(tp=2)),
    ]
    for (_, of), *ranks in zip(items, *run_world(train, 2, items), strict=True):
        weights = united([weights for weights, _ in ranks]) if of.pp > 1 else ranks[0][0]
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)
        assert ranks[0][1] == pytest.approx(norms, rel=1e-10)


def counted(cases: list[Case]) -> list[dict[str, int]]:
    """Calls of hooks on what a stage has, after the last addition to `grad`."""
    results = []
    for case in cases:
        calls: dict[str, int] = {}
        with Counting(config_of(case)) as trainer:
            trainer.calls = calls
            trainer.fit()
        results.append(calls)
    return results


class Counting(Trained):
    calls: dict[str, int]

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.count(name))

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


def test_stages_that_compute_gradients_of_weights_apart_call_them_once_for_each_micro_batch() -> None:
    cases = [case(pp=2, schedule=schedule, steps=1) for schedule in SPLIT]
    for ranks in zip(*run_world(counted, 2, cases), strict=True):
        calls = ranks[0] | ranks[1]
        assert set(calls.values()) == {4}
        assert len(calls) == sum(len(rank) for rank in ranks) == 70


REFUSED = [
    ("configure_models register_hook", r"self\.model\.\S+ has a hook .* configure_models, and was replaced"),
    ("configure_optimizers register_hook", r"\.\S+ has a hook on its gradient, by register_hook\."),
]


@pytest.mark.parametrize(("way", "says"), REFUSED)
def test_those_that_would_not_be_called_are_refused(way: str, says: str) -> None:
    for error in errors_of(train_refused, way):
        assert re.search(says, error), error


def train_refused(way: str) -> None:
    train([(way, case(tp=2))])
