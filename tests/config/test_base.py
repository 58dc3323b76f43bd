"""BaseTrainerConfig and the check from outside, which a subclass cannot switch off by accident."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dream_trainer.config import BaseTrainerConfig, DeviceParameters, TrainingParameters
from dream_trainer.config.trainer_config import check_config
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import Callback
from dream_trainer.events.collection import CallbackCollection

NAMES = {"project": "mnist", "group": "baseline", "experiment": "run-001"}


@dataclass(frozen=True, kw_only=True)
class ShelfParameters:
    size: int = 1


@dataclass(kw_only=True)
class ShelfConfigMixin:
    shelf_parameters: ShelfParameters = field(default_factory=ShelfParameters)


@dataclass
class PlainConfig(BaseTrainerConfig, ShelfConfigMixin):
    learning_rate: float = 1e-3
    hidden_size: int = 128


def test_a_plain_dataclass_may_inherit_it_together_with_a_mixin() -> None:
    config = PlainConfig(0.1, **NAMES, training_parameters=TrainingParameters(n_epochs=10))
    check_config(config)
    assert (config.learning_rate, config.hidden_size, config.seed) == (0.1, 128, 42)
    assert config.training_parameters.n_epochs == 10
    assert config.device_parameters == DeviceParameters()
    assert len(config.callbacks) == 0
    assert config.run_dir == Path("runs/mnist/baseline/run-001")


def test_runs_lie_where_the_config_says_else_the_environment_else_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(**fields: Any) -> Path:
        return BaseTrainerConfig(**NAMES, **fields).run_dir

    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("DREAM_TRAINER_RUNS", raising=False)
    assert place() == Path("runs/mnist/baseline/run-001")
    monkeypatch.setenv("DREAM_TRAINER_RUNS", "~/all")
    assert place() == Path("/home/me/all/mnist/baseline/run-001")
    assert place(runs_dir="/disk/runs") == Path("/disk/runs/mnist/baseline/run-001")
    assert place(runs_dir="~/mine") == Path("/home/me/mine/mnist/baseline/run-001")
    monkeypatch.setenv("DREAM_TRAINER_RUNS", "")
    assert place() == Path("runs/mnist/baseline/run-001")
    monkeypatch.setenv("DREAM_TRAINER_RUNS", "gs://bucket/runs")
    assert place(runs_dir="here").parts[0] == "here"
    with pytest.raises(ConfigError, match=r"DREAM_TRAINER_RUNS='gs:/bucket/runs' is not in a file system"):
        place()


@pytest.mark.pitfall(28)
def test_the_name_of_a_run_has_no_default() -> None:
    missing = "experiment"
    with pytest.raises(TypeError, match=missing):
        BaseTrainerConfig(**{name: value for name, value in NAMES.items() if name != missing})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(NAMES))
@pytest.mark.parametrize("value", ["", "  ", ".", "..", "a/b", "a\\b", "a\nb", None, 3])
def test_a_name_that_cannot_be_a_directory_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        BaseTrainerConfig(**{**NAMES, name: value})


@pytest.mark.pitfall(7)
def test_seed_zero_is_a_seed() -> None:
    config = BaseTrainerConfig(**NAMES, seed=0)  # type: ignore[arg-type]
    check_config(config)
    assert config.seed == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"training_parameters": {"n_epochs": 3}}, r"Use TrainingParameters\("),
        ({"device_parameters": TrainingParameters()}, r"Use DeviceParameters\("),
        ({"runs_dir": "s3://bucket/runs"}, "runs_dir='s3://bucket/runs' is not in a file system"),
        ({"callbacks": Callback()}, r"of type Callback\. Use a list: callbacks=\["),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BaseTrainerConfig(**NAMES, **values)


@pytest.mark.pitfall(67)
@pytest.mark.parametrize(("given", "message"), [([1], "1 is not"), ([Callback], "is not a Callback: build it")])
def test_callbacks_are_a_list_of_callbacks(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CallbackCollection(given)
    with pytest.raises(TypeError, match=message):
        BaseTrainerConfig(**NAMES, callbacks=given)


def test_a_list_of_callbacks_becomes_a_collection_when_it_is_given_and_when_it_is_assigned() -> None:
    first, second = Callback(), Callback()
    config = BaseTrainerConfig(**NAMES, callbacks=[first])
    assert isinstance(config.callbacks, CallbackCollection)
    assert list(config.callbacks) == list(replace(config, seed=1).callbacks) == [first]
    config.callbacks = (second, first)
    assert isinstance(config.callbacks, CallbackCollection)
    assert list(config.callbacks) == [second, first]


@pytest.mark.pitfall(67)
def test_a_validate_without_super_does_not_switch_validation_off() -> None:
    @dataclass
    class Careless(BaseTrainerConfig):
        def validate(self) -> None:
            pass

    with pytest.raises(ConfigError, match="project"):
        check_config(Careless(project="", group="g", experiment="e"))


@pytest.mark.pitfall(67)
def test_a_forgotten_dataclass_is_found_with_the_fields_it_loses() -> None:
    class Forgotten(BaseTrainerConfig):
        learning_rate: float = 1e-3

    with pytest.raises(ConfigError, match=r"learning_rate.*Put @dataclass above class Forgotten"):
        check_config(Forgotten(**NAMES))  # type: ignore[arg-type]


def test_a_default_overridden_without_a_type_is_found() -> None:
    @dataclass
    class Untyped(BaseTrainerConfig):
        seed = 7  # type: ignore[misc]

    with pytest.raises(ConfigError, match="seed is assigned without a type"):
        check_config(Untyped(**NAMES))  # type: ignore[arg-type]


def test_values_assigned_after_the_config_was_built_are_checked() -> None:
    config = PlainConfig(**NAMES)
    config.shelf_parameters = {"size": 2}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"Use ShelfParameters\("):
        check_config(config)


@pytest.mark.pitfall(53)
def test_validation_changes_nothing() -> None:
    config = PlainConfig(**NAMES, callbacks=CallbackCollection())
    before = dict(vars(config))
    check_config(config)
    assert vars(config) == before
