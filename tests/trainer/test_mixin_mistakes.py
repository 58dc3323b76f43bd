"""Mistakes in a mixin of one's own are found before the first step, and named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import ConfigError, HookError
from tests.trainer.saves import Saves, fit, make_config


class Keeps(dt.AbstractTrainer):
    def _mixin_state(self) -> dict[str, Any]:
        return super()._mixin_state() | {"mine": 1}


class KeepsToo(dt.AbstractTrainer):
    def _mixin_state(self) -> dict[str, Any]:
        return super()._mixin_state() | {"mine": 2}


class LikeOurs(dt.AbstractTrainer):
    def _mixin_state(self) -> dict[str, Any]:
        return super()._mixin_state() | {"evaluation": 1}


class KeepsALambda(dt.AbstractTrainer):
    def _mixin_state(self) -> dict[str, Any]:
        return super()._mixin_state() | {"mine": {"call": lambda: 1}}


def refused(*mixins: type, error: type[Exception]) -> str:
    trainer = type("Trainer", (Saves, *mixins), {})(make_config())
    with pytest.raises(error) as found:
        fit(trainer)
    assert trainer.global_step == 0
    assert trainer.seen == []
    return str(found.value)


def test_state_that_cannot_be_saved_is_found_before_the_first_step() -> None:
    assert "mixins.mine.call: <class 'function'> cannot be kept in a checkpoint" in refused(
        KeepsALambda, error=TypeError
    )


def test_two_mixins_with_one_key_are_both_named() -> None:
    said = refused(Keeps, KeepsToo, error=HookError)
    assert said.startswith("Keeps and KeepsToo both keep their state under the key 'mine' of _mixin_state")
    said = refused(LikeOurs, error=HookError)
    assert said.startswith("EvalMixin and LikeOurs both keep their state under the key 'evaluation'")


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
