"""Every: when it calls, once each time, and that a resume goes on counting."""

from typing import Any

import pytest

import dream_trainer as dt
from tests.api import CheckpointParameters, Every
from tests.trainer.small import Alone, Validates, batches, fit, make_config


class Noted(Validates, Alone, dt.EvalMixin):
    """Ten batches of two samples an epoch, two a window, and a validation after each epoch."""


def steps_of_calls(n: int, unit: Any) -> list[int]:
    calls: list[int] = []
    every = Every(n, unit, lambda trainer: calls.append(trainer.global_step))
    config = make_config(n_epochs=2, gradient_accumulation_steps=2, num_sanity_val_steps=1, callbacks=[every])
    with Noted(config, batches(10), batches(1)) as trainer:
        trainer.fit()
        trainer.evaluate()
    return calls


@pytest.mark.parametrize(
    ("n", "unit", "steps"),
    [
        (8, "samples", [2, 4, 6, 8, 10]),
        (1, "samples", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (1, "epochs", [5, 10]),
        (2, "validations", [10]),
    ],
)
def test_it_calls_when_a_multiple_is_passed(n: int, unit: str, steps: list[int]) -> None:
    assert steps_of_calls(n, unit) == steps


def test_validations_are_those_of_training_and_no_evaluate_within_it() -> None:
    calls: list[int] = []

    def note(trainer: Any) -> None:
        calls.append(trainer.global_step)
        trainer.evaluate()

    evaluates = Every(1, "steps", lambda trainer: trainer.evaluate())
    config = make_config(n_epochs=4, num_sanity_val_steps=1, callbacks=[Every(2, "validations", note), evaluates])
    fit(Noted(config, batches(2), batches(1)))
    assert calls == [4, 8]


class Ticks(dt.Callback):
    """A clock by which each window takes a second."""

    now = 0.0

    def post_train_step(self, trainer: Any) -> None:
        self.now += 1.0


def test_seconds_are_those_since_the_last_call() -> None:
    clock, calls = Ticks(), []
    every = Every(2.5, "seconds", lambda trainer: calls.append(trainer.global_step), clock=lambda: clock.now)
    fit(Alone(make_config(n_epochs=1, callbacks=[clock, every]), batches(10)))
    # Asked before each window: it is time before the fourth, which is then still run.
    assert calls == [4, 8]


class Resumed(Noted, dt.CheckpointMixin):
    pass


@pytest.mark.parametrize(
    ("n", "unit", "steps"), [(3, "steps", [3, 6, 9]), (6, "samples", [2, 3, 5, 6, 8, 9]), (2, "validations", [10])]
)
def test_a_resumed_run_calls_as_the_straight_one(n: int, unit: Any, steps: list[int]) -> None:
    calls: list[int] = []
    for stop in (2, 4, 7, 10):
        every = Every(n, unit, lambda trainer: calls.append(trainer.global_step))
        options = {"gradient_accumulation_steps": 2, "checkpoint": CheckpointParameters(save_every_n_epochs=None)}
        fit(Resumed(make_config(max_steps=stop, callbacks=[every], **options), batches(10), batches(1)))
    assert calls == steps
