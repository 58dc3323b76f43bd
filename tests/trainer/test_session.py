"""How a trainer begins and ends: what an exception leaves usable, and what only all ranks together may begin."""

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dream_trainer as dt
from tests import api
from tests.trainer.small import (
    Alone,
    Validates,
    assert_same_weights,
    batches,
    by_hand,
    fit,
    make_config,
    weights as weights_of,
)


class Evaluates(Validates, Alone, dt.EvalMixin):
    """Without a predict_step."""


def misuse(trainer: Any) -> None:
    with pytest.raises(api.HookError, match="no validation loader"):
        trainer.evaluate()
    with pytest.raises(api.HookError, match="predict_step"):
        trainer.predict(batches(1))
    with pytest.raises(api.DataError, match="is no iterable of batches"):
        trainer.evaluate(NoBatches())


class NoBatches:
    """A dataset in the place of a loader."""

    def __len__(self) -> int:
        return 3


def test_a_misused_evaluate_or_predict_leaves_the_trainer_as_it_was() -> None:
    with Evaluates(make_config(n_epochs=1), batches(2)) as trainer:
        misuse(trainer)
        trainer.fit()
        misuse(trainer)
        assert trainer.evaluate(batches(1)).keys() == {"val/loss"}
    assert_same_weights(weights_of(trainer.model), by_hand([[batch] for batch in batches(2)]))


def test_a_trainer_whose_setup_broke_off_says_so_and_is_not_set_up_again() -> None:
    def fail(self: Any) -> Any:
        calls.append("configure_dataloaders")
        raise KeyError("the cause")

    calls: list[str] = []
    trainer = type("Fails", (Evaluates,), {"configure_dataloaders": fail})(make_config(n_epochs=1), batches(1))
    with pytest.raises(KeyError):
        trainer.evaluate(batches(1))
    with pytest.raises(api.StepError, match="left half set up by an exception"):
        trainer.fit()
    assert calls == ["configure_dataloaders"]


@pytest.mark.parametrize(
    "action",
    [
        lambda trainer: trainer.evaluate(),
        lambda trainer: trainer.predict(batches(1)),
        lambda trainer: trainer.fit(),
        lambda trainer: trainer.gathered(trainer.model),
    ],
)
def test_what_all_ranks_do_together_is_refused_at_once_where_one_runs_alone(action: Callable[[Any], object]) -> None:
    alone = api.Every(1, "steps", action, main_process_only=True)
    trainer = Evaluates(make_config(n_epochs=1, callbacks=[alone]), batches(2), batches(1))
    with pytest.raises(RuntimeError, match=r"Every\.post_\w+, which is main_process_only"):
        trainer.fit()


def test_a_hang_in_what_one_rank_runs_alone_is_reported_with_its_callback() -> None:
    class Looks(dt.Callback):
        main_process_only = True

        def post_train_step(self, trainer: Any) -> None:
            inside.append(trainer._runtime.session.watchdog.where())

    class Looked(Alone):
        def post_train_step(self) -> None:
            outside.append(self._runtime.session.watchdog.where())

    inside: list[str] = []
    outside: list[str] = []
    fit(Looked(make_config(n_epochs=1, callbacks=[Looks()]), batches(1)))
    assert inside == [f"{outside[0]}, in Looks.post_train_step, which is main_process_only"]
    assert outside == ["training, step 1, batch 1, exchange 2"]


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()


@pytest.fixture(params=["getstate", "setstate"])
def load_and_get(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Loads a sample that draws; the signal comes when only a part of the generators is set aside, or put back."""

    def interrupt(name: str, number: int) -> None:
        call = vars(random)[name]

        def late(*args: Any) -> Any:
            monkeypatch.setattr(random, name, call)
            os.kill(os.getpid(), number)
            return call(*args)

        if name == request.param:
            monkeypatch.setattr(random, name, late)

    def load(number: int) -> None:
        interrupt("getstate", number)
        with api.preserved_random_state():
            api.seed_cpu(7)
            draws()
            interrupt("setstate", number)

    with api.preserved_random_state():  # otherwise python's state may be known already, and is not copied
        draws()
    draws()
    return load


def words(state: tuple[Any, ...]) -> int:
    """What python's generator draws next in `state`."""
    generator = random.Random()
    generator.setstate(state)
    return generator.getrandbits(32 * 700)


@pytest.mark.pitfall(32)
def test_a_wait_that_a_signal_ends_leaves_all_generators_where_they_were(load_and_get: Callable[[int], None]) -> None:
    api.seed_cpu(3)
    expected = draws()
    api.seed_cpu(3)
    signals = api.Signals(api.Requests())
    with signals.handled():
        signals.wait_for_data(lambda: load_and_get(signal.SIGTERM))
    assert signals.requests.terminated
    assert draws() == expected


@pytest.mark.pitfall(32)
def test_a_save_while_generators_are_put_back_has_them_as_they_were(load_and_get: Callable[[int], None]) -> None:
    api.seed_cpu(3)
    signals, found, before = api.Signals(api.Requests()), [], api.undisturbed_cpu_state()

    def save() -> bool:
        found.append(api.undisturbed_cpu_state())
        return True

    with signals.handled():
        signals.wait_for_data(lambda: load_and_get(signal.SIGUSR1), save)
    (state,) = found
    assert torch.equal(state[0], before[0])
    assert words(state[1]) == words(before[1])
    np.testing.assert_equal(state[2], before[2])
    assert words(api.undisturbed_cpu_state()[1]) == words(before[1])
