"""Mistakes in a mixin of one's own are found before the first step, and named."""

from dataclasses import dataclass, field
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import ConfigError, HookError
from tests.trainer.saves import Saves, make_config


class Keeps(dt.AbstractTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_state("mine", lambda: 1, lambda saved: None)


class KeepsToo(dt.AbstractTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_state("mine", lambda: 2, lambda saved: None, scope="rank")


def test_two_mixins_with_one_name_for_their_state_are_an_error() -> None:
    with pytest.raises(HookError, match=r"^register_state\('mine'\) was called twice: one state would replace"):
        type("Trainer", (Saves, Keeps, KeepsToo), {})(make_config())


def test_a_hook_that_forgets_super_is_told_so() -> None:
    class Forgets(dt.AbstractTrainer):
        def _window_finished(self, *, is_last: bool) -> None:
            pass

    with pytest.raises(HookError, match=r"Forgets._window_finished does not call super\(\)._window_finished"):
        type("Trainer", (Saves, Forgets), {})(make_config())


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
        type("Trainer", (Saves, Needs), {})(make_config())
