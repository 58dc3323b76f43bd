"""How much of a user's trainer is ours: classes, attributes and hooks, counted."""

from __future__ import annotations

from types import FunctionType

import dream_trainer as dt
from dream_trainer.trainer import mixins
from tests.api import Cooperation
from tests.trainer.test_names import Everything, everything_config

MIXINS = {name for name in mixins.__all__ if name.endswith("Mixin") and not name.endswith("ConfigMixin")}


def test_a_trainer_is_its_mixins_and_four_more_classes_of_ours() -> None:
    ours = [cls.__name__ for cls in dt.DreamTrainer.__mro__ if cls.__module__.startswith("dream_trainer.")]
    assert len(set(ours) - MIXINS - {"DreamTrainer"}) <= 4
    assert set(ours) >= MIXINS - {"LocalSGDMixin"}  # which changes what is learned, and is asked for by name


def test_a_trainer_has_at_most_thirty_attributes_before_fit() -> None:
    with Everything(everything_config()) as trainer:
        names = sorted(vars(trainer))
    assert len(names) <= 30, names


def test_mixins_cooperate_through_few_hooks() -> None:
    hooks = [name for name, value in vars(Cooperation).items() if isinstance(value, FunctionType) and name[0] == "_"]
    assert len(hooks) <= 20, hooks
