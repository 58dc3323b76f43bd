"""Optimizers over sharded parameters, in real worlds: they step as in one process, or are refused by name."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, AdamW, Optimizer, Rprop

from tests.api import ConfigError, OptimizerParameters, build_optimizer, build_optimizers, refuse_unshardable
from tests.optim.models import N_TOKENS, batch, loss, model, train
from tests.trainer.small import weights
from tests.worlds import gloo_group, run_world

NAMED: dict[str, dict[str, Any]] = {
    "adamw": {"layer_decay": 0.9},
    "adamw foreach": {"name": "adamw", "fused": False, "amsgrad": True},
    "adam": {"weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "adagrad": {},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "nadam": {},
}
FAIL: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adafactor": (Adafactor, {}),
    "LBFGS": (LBFGS, {}),
    "Rprop": (Rprop, {}),
    "SGD fused": (SGD, {"fused": True}),
    "Adagrad fused": (Adagrad, {"fused": True}),
    "AdamW foreach over a mixture": (AdamW, {"foreach": True}),
}


def parameters_of(name: str) -> OptimizerParameters:
    return OptimizerParameters(**{"name": name.split()[0], "lr": 0.01} | NAMED[name])


def sharded(mesh: Any) -> nn.Module:
    """The model in float64, each block and the root a group; 9 and 7 rows do not divide by 2."""
    module = model(torch.float64)
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def differentiated(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    value = loss(module, tokens)
    value.backward()
    return value


@gloo_group()
def step_everything() -> dict[str, Any]:
    """On each of two ranks: weights after three steps of every named optimizer, and what fails how."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    results: dict[str, Any] = {"failed": {}, "refused": {}}
    for name in NAMED:
        module = sharded(mesh)
        train(module, build_optimizers(parameters_of(name), module), batch(rank, 2))
        results[name] = weights(module)
    for name, (cls, options) in FAIL.items():
        module = sharded(mesh)
        is_mixed = "mixture" in name
        if is_mixed:
            module.scale = nn.Parameter(torch.ones(N_TOKENS, dtype=torch.float64))
            module.register_forward_hook(lambda module, _, out: out * module.scale)
        constructor: Any = cls
        optimizer = constructor(module.parameters(), lr=0.01, **options)
        try:
            refuse_unshardable(optimizer)
        except ConfigError as error:
            results["refused"][name] = str(error)
        try:
            optimizer.step(partial(differentiated, module, batch(rank, 2)))
        except (RuntimeError, NotImplementedError) as error:
            results["failed"][name] = str(error)
        if is_mixed:
            fused_or_foreach = build_optimizer(OptimizerParameters(), module).param_groups
            results["mixture"] = [(group.get("fused"), group.get("foreach")) for group in fused_or_foreach]
    with pytest.raises(ConfigError) as refused:
        build_optimizer(OptimizerParameters(name="sgd", fused=True), sharded(mesh))
    results["refused"]["sgd by name"] = str(refused.value)
    return results


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    return run_world(step_everything, 2)[0]


@pytest.mark.parametrize("name", NAMED)
def test_a_named_optimizer_steps_shards_as_it_steps_whole_parameters(name: str, world: dict[str, Any]) -> None:
    alone = model(torch.float64)
    train(alone, build_optimizers(parameters_of(name), alone), batch())
    for key, value in weights(alone).items():
        torch.testing.assert_close(
            world[name][key], value, rtol=0, atol=1e-11, msg=lambda text, key=key: f"{key} {text}"
        )


@pytest.mark.parametrize("name", [name for name in FAIL if "mixture" not in name])
def test_what_is_refused_really_fails(name: str, world: dict[str, Any]) -> None:
    assert "cannot step sharded parameters" in world["refused"][name]
    # 2.15 has a rule for what Rprop does; it is refused there as on the others, which have none.
    assert (name in world["failed"]) != (name == "Rprop" and torch.__version__ >= "2.15")


def test_a_mixture_of_sharded_and_plain_parameters_is_stepped_one_by_one(world: dict[str, Any]) -> None:
    assert "mixed torch.Tensor and DTensor" in world["failed"]["AdamW foreach over a mixture"]
    assert (None, False) in world["mixture"]
    assert (True, None) in world["mixture"]


def test_a_kernel_that_cannot_step_shards_is_refused_when_built(world: dict[str, Any]) -> None:
    assert "SGD has no fused kernel for sharded parameters" in world["refused"]["sgd by name"]
