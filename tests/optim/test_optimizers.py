"""Optimizers by name step exactly as PyTorch's own, built by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from tests.api import ConfigError, GroupParameters, Muon, OptimizerParameters, build_optimizer, build_optimizers
from tests.optim.models import Transformer, batch, model, train
from tests.simple.loops import assert_same_bits

BY_HAND: list[tuple[type[Optimizer], dict[str, Any], dict[str, Any]]] = [
    (AdamW, {"name": "adamw"}, {"fused": True}),
    (AdamW, {"name": "adamw", "fused": False}, {"foreach": True}),
    (AdamW, {"name": "adamw", "betas": (0.8, 0.9), "eps": 1e-5, "amsgrad": True, "weight_decay": 0.3}, {"fused": True}),
    (Adam, {"name": "adam"}, {"fused": True}),
    (Adam, {"name": "adam", "weight_decay": 0.1, "betas": (0.5, 0.7)}, {"fused": True}),
    (SGD, {"name": "sgd"}, {"fused": True}),
    (SGD, {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"fused": True}),
    (SGD, {"name": "sgd", "momentum": 0.9, "dampening": 0.2, "fused": False}, {"foreach": True}),
    (Adagrad, {"name": "adagrad", "eps": 1e-6}, {"fused": True}),
    (RMSprop, {"name": "rmsprop", "alpha": 0.9, "momentum": 0.5, "centered": True, "eps": 1e-4}, {"foreach": True}),
    (NAdam, {"name": "nadam", "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}, {"foreach": True}),
    (Adafactor, {"name": "adafactor", "weight_decay": 0.1}, {"foreach": True}),
]


@pytest.mark.parametrize(("cls", "values", "how"), BY_HAND, ids=lambda value: str(value))
def test_a_named_optimizer_steps_as_pytorchs(cls: type[Optimizer], values: dict[str, Any], how: dict[str, Any]) -> None:
    by_name, by_hand = model(), model()
    optimizer = build_optimizer(OptimizerParameters(lr=0.01, decay_vectors=True, **values), by_name)
    assert isinstance(optimizer, cls)
    options = {key: value for key, value in values.items() if key not in ("name", "fused")}
    theirs: Callable[..., Optimizer] = cls
    train(by_name, [optimizer], batch())
    train(by_hand, [theirs(by_hand.parameters(), lr=0.01, **options, **how)], batch())
    assert_same_bits(by_name, by_hand)


def test_groups_step_as_groups_built_by_hand() -> None:
    by_name, by_hand = model(), model()
    parameters = OptimizerParameters(
        lr=0.01, weight_decay=0.3, groups=(GroupParameters(pattern=r"^head\.", lr_scale=5.0),)
    )
    head = dict(by_hand.head.named_parameters())
    others = [p for name, p in by_hand.named_parameters() if not name.startswith("head.")]
    is_vector = {id(p) for p in others if p.ndim == 1} | {id(p) for p in by_hand.norm.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if id(p) not in is_vector]},
        {"params": [p for p in others if id(p) in is_vector], "weight_decay": 0.0},
        {"params": [head["weight"]], "lr": 0.05},
        {"params": [head["bias"]], "lr": 0.05, "weight_decay": 0.0},
    ]
    train(by_name, [build_optimizer(parameters, by_name)], batch())
    train(by_hand, [AdamW(groups, lr=0.01, weight_decay=0.3, fused=True)], batch())
    assert_same_bits(by_name, by_hand)


def split(module: Transformer) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """By hand: matrices inside blocks, and all the rest."""
    hidden = [p for p in module.blocks.parameters() if p.ndim == 2]
    return hidden, [p for p in module.parameters() if all(p is not other for other in hidden)]


@pytest.mark.parametrize(
    ("values", "of_muon", "of_adamw"),
    [
        (
            {"adamw_lr": 0.003, "momentum": 0.8, "ns_steps": 4, "betas": (0.8, 0.9)},
            {"momentum": 0.8, "ns_steps": 4, "adjust_lr_fn": "match_rms_adamw"},
            {"lr": 0.003, "betas": (0.8, 0.9)},
        ),
        ({"adamw_lr": 1e-3, "adjust_lr_fn": "original"}, {}, {"lr": 1e-3}),
    ],
    ids=["as it comes", "the original rule"],
)
def test_muon_takes_hidden_matrices(values: dict[str, Any], of_muon: dict[str, Any], of_adamw: dict[str, Any]) -> None:
    by_name, by_hand = model(), model()
    parameters = OptimizerParameters(name="muon", lr=0.01, decay_vectors=True, **values)
    optimizers = build_optimizers(parameters, by_name)
    assert [type(optimizer) for optimizer in optimizers] == [Muon, AdamW]
    hidden, rest = split(by_hand)
    train(by_name, optimizers, batch())
    train(by_hand, [torch.optim.Muon(hidden, lr=0.01, **of_muon), AdamW(rest, fused=True, **of_adamw)], batch())
    assert_same_bits(by_name, by_hand)


def test_muon_takes_the_matrices_that_patterns_name() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    with pytest.raises(ConfigError, match="found no trainable matrix inside repeated blocks"):
        build_optimizers(OptimizerParameters(name="muon"), module)
    muon, adamw = build_optimizers(OptimizerParameters(name="muon", hidden=("^2",)), module)
    assert muon.param_groups[0]["params"] == [module[2].weight]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 5
    with pytest.raises(ConfigError, match="hidden: '2.bias' matches no trainable matrix"):
        build_optimizers(OptimizerParameters(name="muon", hidden=("2.bias",)), module)
