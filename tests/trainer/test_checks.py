"""What is refused before anything runs: of a trainer's class, its mixins, callbacks and combinations of parameters."""

import functools
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.api import ConfigError, HookError
from tests.trainer import saves
from tests.trainer.small import Alone, Batch, batches, fit, make_config, run_config


class Evaluates(Alone, dt.EvalMixin):
    """Everything that has hooks."""


@pytest.mark.parametrize(
    ("name", "written", "arguments", "right"),
    [
        ("training_step", lambda self, batch: {}, "self, batch", "self, batch, batch_idx"),
        ("training_step", lambda self, *, batch, batch_idx: {}, "self, *, batch, batch_idx", "self, batch, batch_idx"),
        ("on_log", lambda self, metrics: None, "self, metrics", "self, metrics, step"),
    ],
)
def test_a_hook_that_cannot_take_its_arguments_is_refused_when_built(
    name: str, written: Any, arguments: str, right: str
) -> None:
    mine = type("Mine", (Evaluates,), {name: written})
    with pytest.raises(HookError, match=re.escape(f"Mine.{name}({arguments}) cannot ")) as caught:
        mine(make_config(), batches(1))
    assert f"def {name}({right})" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "written", "right"),
    [
        ("post_epoch", lambda self: None, "self, trainer"),
        ("on_log", lambda self, trainer, metrics: None, "self, trainer, metrics, step"),
        ("load_state_dict", lambda self: None, "self, state"),
    ],
)
def test_an_event_that_cannot_take_its_arguments_is_refused_when_built(name: str, written: Any, right: str) -> None:
    base = type("Watches", (dt.Callback,), {name: written})
    derived = type("WatchesToo", (base,), {})
    with pytest.raises(HookError, match=rf"Watches\.{name}\(.* cannot ") as caught:
        Alone(make_config(callbacks=[derived()]), batches(1))
    assert f"def {name}({right})" in str(caught.value)


def hands_on(function: Any) -> Any:
    """A decorator of the user's own, which gives the method what it wants."""

    @functools.wraps(function)
    def inner(self: Any, batch: Any, batch_idx: int) -> Any:
        return function(self, batch)

    return inner


def test_hooks_that_can_take_their_arguments_are_left_alone_however_they_are_written() -> None:
    class Lenient(Evaluates):
        @torch.no_grad()
        def validation_step(self, batch: Batch, batch_idx: int, more: int = 0, *, extra: str = "") -> dict[str, Any]:
            return {}

        @hands_on
        def training_step(self, batch: Batch) -> dict[str, Any]:
            return {}

        def predict_step(self, *args: Any) -> Any: ...

        def post_val_epoch(self, renamed: Any, **kwargs: Any) -> None: ...

    class Watches(dt.Callback):
        def post_epoch(self, trainer: Any = None) -> None: ...

        @classmethod
        def post_fit(cls, trainer: Any) -> None: ...

    trainer = fit(Lenient(make_config(n_epochs=1, callbacks=[Watches()]), batches(1), batches(1)))
    assert trainer.local_batches == 1


def test_one_name_for_two_states_is_an_error() -> None:
    trainer = Alone(make_config(), batches(1))
    trainer.register_state("mine", lambda: 1, lambda saved: None)
    with pytest.raises(HookError, match=r"^register_state\('mine'\) was called twice. Give one"):
        trainer.register_state("mine", lambda: 2, lambda saved: None, scope="rank")


def test_a_hook_that_forgets_super_is_told_so() -> None:
    class Forgets(dt.AbstractTrainer):
        def _window_finished(self, *, is_last: bool) -> None:
            pass

    with pytest.raises(HookError, match=r"Forgets._window_finished does not call super\(\)._window_finished"):
        type("Trainer", (Alone, Forgets), {})(make_config())


@dataclass(kw_only=True)
class NeededConfigMixin:
    needed: dict[str, int] = field(default_factory=dict)


class Needs(dt.AbstractTrainer):
    _config_class = NeededConfigMixin


def test_a_missing_field_is_told_with_a_class_of_the_user_s_own_name() -> None:
    config = dt.DreamTrainerConfig(project="p", group="g", experiment="e")
    with pytest.raises(ConfigError, match=r"class Config\(DreamTrainerConfig, NeededConfigMixin\)`, and"):
        type("Trainer", (dt.DreamTrainer, Needs), {})(config)
    with pytest.raises(ConfigError, match=r"Write `class Config\(Config, NeededConfigMixin\)`"):
        type("Trainer", (saves.Saves, Needs), {})(saves.make_config())


class Bare(dt.BaseTrainer, dt.SetupMixin):
    configure_models = configure_optimizers = configure_dataloaders = training_step = lambda *_: None


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ({"activation_checkpointing": "full"}, "activation_checkpointing='full', .* no ActivationCheckpointingMixin"),
        ({"compile": True}, "compile=True, but Bare has no CompileMixin. Add it .* leave it at False"),
        ({"expert_parallel": 2}, "expert_parallel=2, but Bare has no ExpertParallelMixin. Add it"),
        ({"float8": "rowwise"}, "has no Float8Mixin. Add it .* leave it at 'none'"),
        ({"context_parallel": 2}, "has no ContextParallelMixin. Add it"),
        ({"pipeline_parallel": 2}, "has no PipelineParallelMixin. Add it to the trainer's bases. Or leave it at 1"),
        ({"tensor_parallel": 2}, "has no TensorParallelMixin. Add it"),
    ],
    ids=str,
)
def test_a_trainer_without_the_mixin_is_told_to_add_it(devices: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Bare(run_config(device_parameters=dt.DeviceParameters(device="cpu", **devices)))
