"""Definitions of a user's classes are heard wherever the class stands, once each, or refused by name."""

from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.api import HookError
from tests.trainer.small import Alone, batches, fit, make_config

heard: list[str] = []


def saying(word: str, *bases: type, hands_on: bool = False) -> type:
    """A class of these bases whose own event says `word`, and calls that of the next class if it is to."""

    def says(self: Any, model: Any, optimizer: Any) -> None:
        heard.append(word)

    def says_and_hands_on(self: Any, model: Any, optimizer: Any) -> None:
        heard.append(word)
        super(cls, self).pre_optimizer_step(model, optimizer)

    cls = type(word.title(), bases, {"pre_optimizer_step": says_and_hands_on if hands_on else says})
    return cls


Noise, Clipping, Polite = saying("noise"), saying("clipping"), saying("polite", hands_on=True)
Own, PoliteOwn = saying("own", Alone), saying("own", Alone, hands_on=True)
Twice = saying("derived", Own)
PoliteTwice = saying("derived", saying("own", Alone, Noise), hands_on=True)


def trained(*bases: type) -> list[str]:
    heard.clear()
    fit(type("Mine", bases, {})(make_config(n_epochs=1), batches(1)))
    return list(heard)


@pytest.mark.pitfall(79)
@pytest.mark.parametrize(
    ("bases", "expected"),
    [
        ((Noise, Alone, Clipping), ["noise", "clipping"]),
        ((Alone, Noise, Clipping), ["noise", "clipping"]),
        ((Polite, Alone, Noise), ["polite", "noise"]),
        ((Own, Noise), ["own", "noise"]),
        ((PoliteOwn, Noise), ["own", "noise"]),
        ((Twice, Noise), ["derived", "noise"]),
        ((PoliteTwice,), ["derived", "own", "noise"]),
    ],
)
def test_every_definition_of_an_event_is_heard_once_wherever_its_class_stands(
    bases: tuple[type, ...], expected: list[str]
) -> None:
    assert trained(*bases) == expected


@pytest.mark.pitfall(79)
def test_an_event_behind_the_base_that_cannot_take_its_arguments_is_refused() -> None:
    class Short:
        def pre_optimizer_step(self) -> None: ...

    with pytest.raises(HookError, match=r"Short\.pre_optimizer_step\(self\).* cannot be called"):
        type("Mine", (Own, Short), {})(make_config(), batches(1))


class MovesMixin:
    def move_batch(self, batch: Any, device: torch.device) -> Any:
        return batch


class LogsMixin:
    def configure_loggers(self) -> list[Any]:
        return []


class Bare(dt.BaseTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {}


class Logs(Alone, dt.LoggerMixin): ...


@pytest.mark.pitfall(79)
@pytest.mark.parametrize(
    ("base", "mixin", "hook"), [(Bare, MovesMixin, "move_batch"), (Logs, LogsMixin, "configure_loggers")]
)
def test_a_hook_of_a_mixin_behind_the_trainer_is_refused_with_the_order_that_calls_it(
    base: type, mixin: type, hook: str
) -> None:
    with pytest.raises(HookError, match=rf"(?s){mixin.__name__}\.{hook} is never called") as caught:
        type("Mine", (base, mixin), {})(make_config())
    assert f"class Mine({mixin.__name__}, {base.__name__})" in str(caught.value)


class CountsMixin:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


class NamesMixin:
    def state_dict(self) -> dict[str, Any]:
        return {"name": "x"}


@pytest.mark.pitfall(79)
def test_of_two_states_of_which_one_would_not_be_saved_both_classes_are_named() -> None:
    with pytest.raises(HookError) as caught:
        type("Mine", (CountsMixin, NamesMixin, Alone), {})(make_config(), batches(1))
    assert "CountsMixin.state_dict" in str(caught.value)
    assert "NamesMixin.state_dict" in str(caught.value)
    assert "super().state_dict()" in str(caught.value)


@pytest.mark.pitfall(79)
def test_an_event_of_a_mixin_behind_callback_is_refused_with_the_order_that_calls_it() -> None:
    class Watches:
        def post_epoch(self, trainer: Any) -> None: ...

    class Mine(dt.Callback, Watches): ...

    with pytest.raises(HookError, match=r"Watches\.post_epoch is never called.*class Mine\(Watches, Callback\)"):
        Alone(make_config(callbacks=[Mine()]), batches(1))
