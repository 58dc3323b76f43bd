"""A user's attribute or method with a name of the framework's is an error that names both, when it is assigned or
built; names of other frameworks are answered with ours."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from tests.api import ConfigError, HookError, StepError
from tests.trainer.small import Alone, Config, batches, make_config


class Everything(dt.DreamTrainer):
    """All mixins, with the least that they ask for."""

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


PUBLIC = ["accumulation_window", "changing_weights", "warn_once", "seconds_saving", "steps_per_pass", "planned_steps"]
PUBLIC += ["batch_size", "best", "progress", "log", "step", "training", "val_name", "history", "world", "config", "fit"]
PRIVATE = ["_runtime", "_land", "_resume", "_keeps_ranks_equal"]


@pytest.mark.pitfall(88)
@pytest.mark.parametrize("name", [*PUBLIC, *PRIVATE])
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


def test_the_config_may_be_assigned_before_the_base_does_it() -> None:
    class Mine(Alone):
        def __init__(self, config: Config) -> None:
            self.config = config
            super().__init__(config)

    config = make_config()
    assert Mine(config).config is config


def helper(self: Any) -> None: ...


@pytest.mark.pitfall(88)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, helper)
            for name in ("_load", "_validate", "_stamp", "_land", "_close", "_runtime", "train_dataloader")
        ),
        *((name, 32) for name in ("batch_size", "best", "log", "training", "val_name", "training_step", "post_epoch")),
        ("step", lambda self, x: x),
        ("world", property(lambda self: 1)),
    ],
)
def test_a_definition_with_a_name_of_ours_is_refused_when_the_trainer_is_built(name: str, value: Any) -> None:
    mine = type("Mine", (Everything,), {name: value})
    with pytest.raises(HookError, match=rf"Mine\.{name}.*({name}|def step|configure_dataloaders)"):
        mine(everything_config())


@pytest.mark.parametrize("name", ["validation_step", "post_epoch", "configure_schedulers"])
def test_a_hook_that_is_none_is_to_be_left_out(name: str) -> None:
    with pytest.raises(HookError, match=rf"Mine.{name} is None, and the framework calls it. Leave it out"):
        type("Mine", (Everything,), {name: None})(everything_config())


def test_what_is_made_to_be_overridden_may_be() -> None:
    class Mixin(dt.BaseTrainer):
        """A mixin of the user's own takes part as ours do."""

        def _window_finished(self, *, is_last: bool) -> None:
            super()._window_finished(is_last=is_last)

    class Mine(Everything, Mixin):
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


# -- names of other frameworks


@pytest.mark.parametrize(
    ("use", "answer"),
    [
        (lambda t: t(torch.ones(1)), "self.model(x)"),
        (lambda t: t.log("loss", 1.0, prog_bar=True), "Progress"),
        (lambda t: t.log("loss", 1.0, on_step=True), "on_step"),
        (lambda t: t.log_dict({"loss": 1.0}, sync_dist=True), "sync_dist"),
    ],
)
def test_names_of_lightning_are_answered_with_ours(use: Any, answer: str) -> None:
    trainer = Everything(everything_config())
    with pytest.raises((AttributeError, TypeError)) as caught:
        use(trainer)
    assert answer in str(caught.value)


def test_an_attribute_that_is_nobodys_is_said_as_python_says_it() -> None:
    trainer = Everything(everything_config())
    with pytest.raises(AttributeError, match="'Everything' object has no attribute 'modle'"):
        trainer.modle
    assert not hasattr(trainer, "device")


def test_a_forgotten_call_of_the_base_constructor_is_named() -> None:
    class Mine(Everything):
        def __init__(self, config: Any) -> None:
            self.width = 3

    for use in (lambda t: t.fit(), lambda t: t.config, lambda t: t.describe(), lambda t: t.close()):
        with pytest.raises(HookError, match=r"Mine\.__init__ does not call super\(\).__init__\(config\)"):
            use(Mine(everything_config()))


def test_step_with_its_arguments_the_wrong_way_round_says_the_right_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Mine(Alone):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.backward(self.model(batch[0]).sum())
            self.step(self.optimizer, self.model)  # type: ignore[arg-type]
            return {}

    with pytest.raises(StepError, match=r"self\.step\(model, optimizer\)"), Mine(make_config(), batches(2)) as trainer:
        trainer.fit()


# -- configs


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


@dataclass
class Sized(Config):
    vocabulary: int = 0


def test_fields_of_the_users_own_may_be_filled_in_later() -> None:
    config = Sized(**{f: getattr(make_config(), f) for f in vars(make_config()) if not f.startswith("_")})
    Alone(config, batches(2))
    config.vocabulary = 3
    assert config.vocabulary == 3


@pytest.mark.pitfall(81)
def test_another_config_for_a_trainer_is_refused() -> None:
    trainer = Alone(make_config(), batches(2))
    with pytest.raises(HookError, match="Build a new trainer"):
        trainer.config = make_config()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: dt.TrainingParameters(max_step=3), ["max_step", "max_steps"]),  # type: ignore[call-arg]
        (lambda: dt.DeviceParameters(precison="bf16"), ["precison", "precision"]),  # type: ignore[call-arg]
        (lambda: dt.CheckpointParameters(save_every=3), ["save_every", "save_every_n_steps"]),  # type: ignore[call-arg]
        (lambda: make_config_with(traning_parameters=None), ["traning_parameters", "training_parameters"]),
    ],
)
def test_a_misspelt_config_field_is_answered_with_the_nearest(build: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert all(word in str(caught.value) for word in words)


def make_config_with(**fields: Any) -> Config:
    return Config(project="p", group="g", experiment="e", **fields)


def test_assigning_to_frozen_parameters_says_how_to_change_them() -> None:
    parameters = dt.TrainingParameters(max_steps=3)
    with pytest.raises(AttributeError, match=r"replace\(training_parameters, max_steps=\.\.\.\)"):
        parameters.max_steps = 4  # type: ignore[misc]


def test_an_experiment_whose_name_no_directory_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="experiment=.* 300 bytes"):
        replace(make_config(), experiment="x" * 300)


def test_the_signature_of_log_is_still_told() -> None:
    assert list(inspect.signature(Everything.log).parameters)[:5] == ["self", "name", "value", "weight", "reduce"]
