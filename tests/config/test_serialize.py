"""Configs to plain dicts and back, and the difference of two of them."""

import json
import math
from collections import UserList
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from dream_trainer.config import BaseTrainerConfig, DeviceParameters, TrainingParameters, difference, from_dict, to_dict
from dream_trainer.config.logger_parameters import WandbParameters
from dream_trainer.config.serialize import with_later_fields
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import Callback


class Colour(Enum):
    RED = "red"


class Watcher(Callback):
    def __init__(self, every: int) -> None:
        self.every = every
        self.model = torch.nn.Linear(1, 1)


@dataclass
class RichConfig(BaseTrainerConfig):
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    widths: list[int] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    data: Path | None = None
    colour: Colour = Colour.RED
    anything: Any = None


def rich(**values: Any) -> RichConfig:
    return RichConfig(**{"project": "p", "group": "g", "experiment": "e", **values})


def test_a_config_survives_json() -> None:
    config = rich(
        learning_rate=3,
        widths=[1, 2],
        dtype=torch.bfloat16,
        data=Path("a/b"),
        seed=0,
        training_parameters=TrainingParameters(max_time=timedelta(minutes=90), max_steps=0, val_every_minutes=1.5),
        device_parameters=DeviceParameters.hsdp(dp_shard=2),
    )
    data = json.loads(json.dumps(to_dict(config)))
    again = from_dict(RichConfig, data)
    assert difference(to_dict(again), data) == []
    assert again.training_parameters == config.training_parameters
    assert again.device_parameters == config.device_parameters
    assert (again.betas, again.widths, again.dtype) == ((0.9, 0.95), [1, 2], torch.bfloat16)
    assert (again.data, again.colour, again.seed) == (Path("a/b"), Colour.RED, 0)


@dataclass
class CodeConfig:
    activation: Callable[..., Any] = torch.relu
    layer: type = torch.nn.Linear


def test_code_is_recorded_by_name_and_not_restored() -> None:
    data = to_dict(CodeConfig(activation=math.sqrt))
    assert data == {"activation": "math.sqrt", "layer": "torch.nn.modules.linear.Linear"}
    with pytest.raises(ConfigError, match="set this field in code instead"):
        from_dict(CodeConfig, data)
    assert from_dict(CodeConfig, {}).layer is torch.nn.Linear


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rat": 1}, "unknown keys learning_rat"),
        ({"training_parameters": {"n_epoch": 1}}, "unknown keys n_epoch.*training_parameters"),
        ({"seed": "3"}, "'3' is of type str, not int.*seed"),
        ({"training_parameters": {"fast_dev_run": "False"}}, "of type str, not bool"),
        ({"training_parameters": {"n_epochs": -1}}, "n_epochs=-1 is too small"),
        ({"dtype": "float99"}, "not a dtype"),
        ({"project": ""}, "cannot be one directory"),
    ],
)
def test_data_that_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(RichConfig, {"project": "p", "group": "g", "experiment": "e", **change})


def test_lists_and_dicts_of_other_libraries_are_taken_as_pythons_own() -> None:
    tags, arguments = UserList(["a", "b"]), MappingProxyType({"settings": {"x": UserList([1, 2])}})
    found = WandbParameters(tags=tags, init_arguments=arguments)  # type: ignore[arg-type]
    assert found == WandbParameters(tags=("a", "b"), init_arguments={"settings": {"x": [1, 2]}})
    assert to_dict(rich(anything=MappingProxyType({"sizes": UserList([1, 2])})))["anything"] == {"sizes": [1, 2]}


@pytest.mark.pitfall(56)
def test_the_difference_names_changed_fields_by_their_path() -> None:
    old = to_dict(rich(training_parameters=TrainingParameters(n_epochs=3)))
    new = to_dict(rich(training_parameters=TrainingParameters(n_epochs=5), learning_rate=1e-4))
    assert difference(old, new) == ["training_parameters.n_epochs: 3 -> 5", "learning_rate: 0.001 -> 0.0001"]
    assert difference({"a": 1, "b": (1, 2)}, {"b": [1, 2], "c": [1]}) == ["a: 1 -> (absent)", "c: (absent) -> [1]"]


@pytest.mark.pitfall(56)
def test_fields_that_later_versions_have_at_their_defaults_are_no_difference_to_what_earlier_ones_wrote() -> None:
    config = rich(training_parameters=TrainingParameters(n_epochs=3, max_steps=7))
    old, new = to_dict(config), to_dict(config)
    del old["device_parameters"], old["runs_dir"], old["learning_rate"]
    for name in ("n_epochs", "max_steps", "on_nonfinite"):
        del old["training_parameters"][name]
    assert difference(with_later_fields(old, config), new) == [
        "training_parameters.n_epochs: None -> 3",
        "training_parameters.max_steps: None -> 7",
        "learning_rate: (absent) -> 0.001",  # of the user's class
    ]


class Counts(Callback):
    def __init__(self, unit: str, limits: tuple[int, ...] = (1, 2), function: Callable[..., Any] | None = None) -> None:
        self.unit = unit
        self.limits = limits
        self.function = function  # has no plain form
        self.seen = 0
        self._due = 1.5


class CountsMore(Counts):
    def __init__(self, more: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.more = more


@pytest.mark.pitfall(56)
def test_of_a_callback_only_what_the_user_configured_is_part_of_the_record() -> None:
    callback = CountsMore(unit="s", function=math.sqrt)
    before = to_dict(rich(callbacks=[callback]))
    (record,) = before["callbacks"]
    assert record == {"class": f"{__name__}.CountsMore", "more": True, "unit": "s", "limits": [1, 2]}
    assert len(from_dict(RichConfig, before).callbacks) == 0  # they are code
    callback.seen, callback._due = 7, 2.5
    assert difference(before, to_dict(rich(callbacks=[callback]))) == []


@pytest.mark.pitfall(56)
def test_the_record_of_a_callback_survives_json_and_one_more_shifts_no_other() -> None:
    old = json.loads(json.dumps(to_dict(rich(callbacks=[Counts("s"), Counts("s")]))))
    new = to_dict(rich(callbacks=[Watcher(3), Counts("s"), Counts("ms", (1, 3))]))
    assert difference(old, new) == [
        "callbacks.Counts 2.unit: 's' -> 'ms'",
        "callbacks.Counts 2.limits: [1, 2] -> [1, 3]",
        f"callbacks.Watcher.class: (absent) -> '{__name__}.Watcher'",
        "callbacks.Watcher.every: (absent) -> 3",
    ]
    assert difference({"groups": ({"lr": 1.0}, {"lr": 2.0})}, {"groups": [{"lr": 1.0}, {"lr": 3.0}]}) == [
        "groups.1.lr: 2.0 -> 3.0"
    ]
