"""Parameters of optimizers and schedules: what they refuse, and their ways to a dict and a command line."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import ConfigError, GroupParameters, OptimizerParameters, ScheduleParameters, from_dict, parse, to_dict


@dataclass(kw_only=True)
class Config(dt.BaseTrainerConfig):
    optimizer: OptimizerParameters = field(default_factory=OptimizerParameters)
    schedule: ScheduleParameters = field(default_factory=ScheduleParameters)


RUN = ["--project", "p", "--group", "g", "--experiment", "e"]


WRONG: dict[type[Any], list[tuple[dict[str, Any], str]]] = {
    OptimizerParameters: [
        ({"name": "lbfgs"}, "name='lbfgs' is not known. Use 'adamw'"),
        ({"lr": 0}, "lr=0 is not a number above zero"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 is not a number of at least 0"),
        ({"momentum": 0.9}, "momentum=0.9 means nothing to 'adamw'. Leave it out, or use 'sgd', 'rmsprop' or 'muon'."),
        ({"name": "sgd", "betas": (0.9, 0.95)}, "betas=(0.9, 0.95) means nothing to 'sgd'"),
        ({"betas": (0.9, 1.0)}, "betas[1]=1.0 is not a number from 0 to below 1"),
        ({"layer_decay": 1.5}, "layer_decay=1.5 is not a number from 0 to 1"),
        ({"hidden": ("a",)}, "hidden=('a',) means nothing to 'adamw'"),
        ({"groups": ("head",)}, "is no tuple of GroupParameters. Use (GroupParameters"),
        ({"groups": GroupParameters(pattern="head", lr_scale=2)}, "is no tuple of GroupParameters. Use (Group"),
        ({"name": "muon", "hidden": ("(",)}, "hidden='(' is not a regular expression"),
        ({"name": "muon", "adjust_lr_fn": "original"}, "Set adamw_lr too"),
    ],
    GroupParameters: [
        ({"pattern": "["}, "pattern='[' is not a regular expression"),
        ({"pattern": "", "lr": 1.0}, "pattern='' is not a pattern"),
        ({"pattern": "a", "lr": 1.0, "lr_scale": 2.0}, "both set the rate"),
    ],
    ScheduleParameters: [
        ({"unit": "batch"}, "unit='batch' is not known. Use 'step', 'epoch' or 'token'."),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio=0.1 means nothing to 'constant'. Leave it out, or use 'cosine'"),
        ({"name": "cosine", "decay_steps": 5}, "decay_steps=5 means nothing to 'cosine'. Leave it out, or use 'wsd'."),
        ({"name": "cosine", "min_lr_ratio": 1.5}, "min_lr_ratio=1.5 is not a number from 0 to 1"),
        ({"warmup_steps": 1.5}, "warmup_steps=1.5 is not a fraction of the total"),
        ({"name": "wsd", "decay_shape": "exponential"}, "never reaches min_lr_ratio=0"),
        ({"name": "plateau", "warmup_steps": 5}, "Leave out warmup_steps=5"),
        ({"name": "plateau", "unit": "epoch"}, 'and unit="epoch"'),
    ],
}


@pytest.mark.parametrize(("kind", "values", "message"), [(kind, *row) for kind in WRONG for row in WRONG[kind]])
def test_a_value_that_cannot_work_is_refused_when_built(kind: type[Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        kind(**values)
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
