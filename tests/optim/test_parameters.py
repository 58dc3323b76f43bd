"""OptimizerParameters: what it refuses, and its ways to a dict and a command line."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch

import dream_trainer as dt
from tests.api import (
    HYPERPARAMETERS,
    ConfigError,
    GroupParameters,
    OptimizerName,
    OptimizerParameters,
    ScheduleParameters,
    from_dict,
    parse,
    to_dict,
)

CLASSES = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
}


@dataclass(kw_only=True)
class Config(dt.BaseTrainerConfig):
    optimizer: OptimizerParameters = field(default_factory=OptimizerParameters)
    schedule: ScheduleParameters = field(default_factory=ScheduleParameters)


RUN = ["--project", "p", "--group", "g", "--experiment", "e"]


def test_every_name_has_its_hyperparameters() -> None:
    assert set(HYPERPARAMETERS) == set(get_args(OptimizerName)) == {*CLASSES, "muon"}


@pytest.mark.parametrize("name", CLASSES)
def test_every_hyperparameter_is_an_argument_of_pytorchs_optimizer(name: str) -> None:
    assert set(HYPERPARAMETERS[name]) <= set(inspect.signature(CLASSES[name]).parameters)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "lbfgs"}, "name='lbfgs' is not known. Use 'adamw'"),
        ({"lr": 0}, "lr=0 is not a number above zero"),
        ({"lr": True}, "lr=True"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 is not a number of at least 0"),
        ({"momentum": 0.9}, "momentum=0.9 means nothing to 'adamw'. Leave it out, or use 'sgd', 'rmsprop' or 'muon'."),
        ({"name": "sgd", "betas": (0.9, 0.95)}, "betas=(0.9, 0.95) means nothing to 'sgd'"),
        ({"betas": (0.9, 1.0)}, "betas[1]=1.0 is not a number from 0 to below 1"),
        ({"betas": 0.9}, "betas=0.9 are not two numbers"),
        ({"eps": 0}, "eps=0 is not a number above zero"),
        ({"amsgrad": 1}, "amsgrad=1 is not a boolean"),
        ({"name": "sgd", "nesterov": True}, "nesterov=True needs momentum"),
        ({"name": "sgd", "dampening": 0.1}, "dampening=0.1 does nothing without momentum"),
        ({"name": "rmsprop", "alpha": 1.5}, "alpha=1.5"),
        ({"name": "rmsprop", "fused": True}, "'rmsprop' has no fused implementation"),
        ({"fused": "yes"}, "fused='yes' is not a boolean"),
        ({"layer_decay": 0.0}, "layer_decay=0.0"),
        ({"layer_decay": 1.5}, "layer_decay=1.5 is not a number from 0 to 1"),
        ({"hidden": ("a",)}, "hidden=('a',) means nothing to 'adamw'"),
        ({"groups": ("head",)}, "is no tuple of GroupParameters. Use (GroupParameters"),
        ({"decay_vectors": 1}, "decay_vectors=1 is not a boolean"),
        ({"name": "muon", "ns_steps": 0}, "ns_steps=0"),
        ({"name": "muon", "hidden": ("(",)}, "hidden='(' is not a regular expression"),
        ({"name": "muon", "adjust_lr_fn": "original"}, "Set adamw_lr too"),
        ({"name": "muon", "adjust_lr_fn": "none"}, "adjust_lr_fn='none' is not known"),
        ({"name": "muon", "adamw_lr": -1}, "adamw_lr=-1"),
    ],
)
def test_a_value_that_cannot_work_is_refused_when_built(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        OptimizerParameters(**values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pattern": "["}, "pattern='[' is not a regular expression"),
        ({"pattern": "", "lr": 1.0}, "pattern='' is not a pattern"),
        ({"pattern": "a"}, "the group 'a' changes nothing"),
        ({"pattern": "a", "lr": 1.0, "lr_scale": 2.0}, "both set the rate"),
        ({"pattern": "a", "lr_scale": 0.0}, "lr_scale=0.0 is not a number above zero"),
        ({"pattern": "a", "weight_decay": -1}, "weight_decay=-1"),
    ],
)
def test_a_group_that_cannot_work_is_refused_when_built(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        GroupParameters(**values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "parameters",
    [
        OptimizerParameters(),
        OptimizerParameters(
            name="adamw",
            betas=(0.9, 0.95),
            fused=True,
            layer_decay=0.8,
            groups=(GroupParameters(pattern="head", lr_scale=10), GroupParameters(pattern="x", weight_decay=0)),
        ),
        OptimizerParameters(name="muon", hidden=("blocks",), adamw_lr=3e-4, fused=False),
    ],
)
def test_parameters_survive_the_way_to_a_dict_and_back(parameters: OptimizerParameters) -> None:
    assert from_dict(OptimizerParameters, json.loads(json.dumps(to_dict(parameters)))) == parameters


def test_a_command_line_sets_every_kind_of_field() -> None:
    line = "--optimizer.name rmsprop --optimizer.lr 0.02 --optimizer.centered True --optimizer.fused False"
    assert parse(Config, [*RUN, *line.split()]).optimizer == OptimizerParameters(
        name="rmsprop", lr=0.02, centered=True, fused=False
    )
    line = "--optimizer.name muon --optimizer.hidden up down --optimizer.betas 0.9 0.95"
    assert parse(Config, [*RUN, *line.split()]).optimizer == OptimizerParameters(
        name="muon", hidden=("up", "down"), betas=(0.9, 0.95)
    )


def test_a_command_line_changes_groups_that_the_config_has() -> None:
    groups = (GroupParameters(pattern="head", lr_scale=10.0),)
    config = Config(project="p", group="g", experiment="e", optimizer=OptimizerParameters(groups=groups))
    changed = parse(config, ["--optimizer.groups.0.lr-scale", "3"])
    assert changed.optimizer.groups == (GroupParameters(pattern="head", lr_scale=3.0),)


def test_a_command_line_with_an_option_of_another_optimizer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(Config, [*RUN, "--optimizer.name", "sgd", "--optimizer.betas", "0.9", "0.95"])
    assert end.value.code == 2
    assert "means nothing to 'sgd'" in capsys.readouterr().err
