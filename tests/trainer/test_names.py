"""A user's attribute or method with a name of the framework's is an error that names both, when it is assigned or
built; names of other frameworks are answered with ours."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from tests.api import ConfigError, HookError
from tests.trainer.small import Alone, Config, batches, make_config


class Everything(dt.DreamTrainer):
    def configure_models(self) -> None:
        self.model = nn.Linear(3, 1)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return batches(2), None

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {}


def everything_config(**fields: Any) -> dt.DreamTrainerConfig:
    return dt.DreamTrainerConfig(
        project="tests", group="names", experiment="run", device_parameters=dt.DeviceParameters(device="cpu"), **fields
    )


@pytest.mark.pitfall(88)
@pytest.mark.parametrize("name", ["batch_size", "progress", "step", "config", "_runtime"])
@pytest.mark.parametrize("when", ["constructor", "configure"])
def test_an_attribute_with_a_name_of_ours_is_refused_where_it_is_assigned(name: str, when: str) -> None:

    class Mine(Everything):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if when == "constructor":
                setattr(self, name, 32)

        def configure_models(self) -> None:
            super().configure_models()
            setattr(self, name, 32)

    with pytest.raises(HookError, match=rf"self\.{name} of Mine has a name .*{name} of "):
        Mine(everything_config()).launch_and_resume()


@pytest.mark.pitfall(88)
def test_every_attribute_and_method_of_a_trainer_is_guarded() -> None:
    with Everything(everything_config(training_parameters=dt.TrainingParameters(max_steps=0))) as trainer:
        trainer.fit()
        ours = {
            name for part in type(trainer).__mro__ if part.__module__.startswith("dream_trainer") for name in vars(part)
        }
        taken = {*ours, *vars(trainer)} - {"model", "optimizer", "train_dataloader"}
        for name in sorted(name for name in taken if "__" not in name):
            before = vars(trainer).get(name)
            with pytest.raises(HookError, match=name):
                setattr(trainer, name, object())
            assert vars(trainer).get(name) is before


@pytest.mark.pitfall(88)
def test_what_the_user_assigned_first_is_not_taken_away() -> None:
    class Mine(Alone):
        def __init__(self, config: Config) -> None:
            self.progress = 1  # type: ignore[assignment]
            super().__init__(config)

    with pytest.raises(HookError, match=r"self\.progress of Mine has a name that the framework uses"):
        Mine(make_config())


@pytest.mark.pitfall(88)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, lambda self: None) for name in ("_load", "train_dataloader")),
        *((name, lambda self, *args, **kwargs: None) for name in ("warn_once", "request_stop")),
        *((name, 32) for name in ("batch_size", "training", "post_epoch")),
        ("step", lambda self, x: x),
        ("world", property(lambda self: 1)),
    ],
)
def test_a_definition_with_a_name_of_ours_is_refused_when_the_trainer_is_built(name: str, value: Any) -> None:
    mine = type("Mine", (Everything,), {name: value})
    with pytest.raises(HookError, match=rf"Mine\.{name}.*({name}|def step|configure_dataloaders)"):
        mine(everything_config())


def test_what_is_made_to_be_overridden_may_be() -> None:
    class Mine(Everything):
        extra = 3

        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(f"mine/{name}", value, **options)

        def backward(self, loss: Any, **options: Any) -> None:
            super().backward(loss, **options)

        def _helper(self) -> None: ...

    trainer = Mine(everything_config())
    trainer.training_step = torch.no_grad()(trainer.training_step)  # type: ignore[method-assign]
    trainer._own, trainer.rate = 1, 2
    assert (trainer._own, trainer.rate, trainer.extra) == (1, 2, 3)


def test_a_forgotten_call_of_the_base_constructor_is_named() -> None:
    class Mine(Everything):
        def __init__(self, config: Any) -> None:
            self.width = 3

    for use in (lambda t: t.fit(), lambda t: t.config, lambda t: t.describe(), lambda t: t.close()):
        with pytest.raises(HookError, match=r"Mine\.__init__ does not call super\(\).__init__\(config\)"):
            use(Mine(everything_config()))


@pytest.mark.pitfall(81)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("training_parameters", dt.TrainingParameters(max_steps=7)),
        ("experiment", "../../x"),
        ("seed", 3),
        ("callbacks", dt.CallbackCollection()),
    ],
)
def test_a_config_that_a_trainer_was_built_with_cannot_be_changed(field: str, value: Any) -> None:
    config = make_config(max_steps=2)
    trainer = Alone(config, batches(2))
    with pytest.raises(ConfigError, match=rf"{field}.*replace\(config, {field}=\.\.\.\)"):
        setattr(trainer.config, field, value)
    changed = replace(config, seed=5)
    changed.seed = 6
    assert config.seed == 42
    trainer.close()
    setattr(config, field, getattr(make_config(), field))  # for the next trainer


@pytest.mark.pitfall(81)
def test_another_config_for_a_trainer_is_refused() -> None:
    trainer = Alone(make_config(), batches(2))
    with pytest.raises(HookError, match="Build a new trainer"):
        trainer.config = make_config()
