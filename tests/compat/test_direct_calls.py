"""Backward and optimizer steps without PyTorch's layers: the same numbers, and whatever somebody hangs on them runs."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from dream_trainer.compat import direct_calls

X = torch.linspace(-1, 1, 12).view(4, 3)


def make(optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    return model, optimizer(model.parameters(), lr=0.1, **options)


def loss_of(model: nn.Module) -> Tensor:
    return torch.as_tensor(model(X).square().mean())


@pytest.fixture
def stepped() -> tuple[nn.Module, Any]:
    """A model with gradients and its optimizer."""
    model, optimizer = make()
    loss_of(model).backward()
    return model, optimizer


# -- backward


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_gradients_are_those_of_backward(shape: tuple[int, ...]) -> None:
    one, _ = make()
    other = copy.deepcopy(one)
    loss_of(one).view(shape).backward()
    direct_calls.backward(loss_of(other).view(shape))
    for expected, found in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)  # type: ignore[arg-type]


def test_gradients_add_up_and_the_graph_is_freed() -> None:
    model, _ = make()
    direct_calls.backward(loss_of(model))
    once = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    loss = loss_of(model)
    direct_calls.backward(loss)
    assert all(torch.equal(2 * a, p.grad) for a, p in zip(once, model.parameters(), strict=True))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="second time"):
        direct_calls.backward(loss)


def test_what_backward_refuses_is_refused() -> None:
    leaf = torch.ones((), dtype=torch.complex64, requires_grad=True)
    with pytest.raises(RuntimeError, match="complex"):
        direct_calls.backward(leaf * 2)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.vmap(lambda x: direct_calls.backward(x * torch.ones((), requires_grad=True)))(torch.ones(2))


def test_a_mode_and_a_subclass_see_backward() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs)

    model, _ = make()
    loss = loss_of(model)
    with Mode():
        direct_calls.backward(loss)
    assert torch.Tensor.backward in seen
    seen.clear()
    direct_calls.backward(loss_of(model).as_subclass(Loud))
    assert torch.Tensor.backward in seen


def test_a_replaced_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make()
    calls: list[str] = []

    class Plain(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        def backward(self, *args: Any, **kwargs: Any) -> None:
            calls.append("of a class")

    direct_calls.backward(loss_of(model).as_subclass(Plain))
    loss = loss_of(model)
    loss.backward = lambda: calls.append("of a tensor")  # type: ignore[method-assign,assignment]
    direct_calls.backward(loss)
    for place in (Tensor, torch.autograd):
        with monkeypatch.context() as patches:
            patches.setattr(place, "backward", lambda *args, **kwargs: calls.append("of all"))
            direct_calls.backward(loss_of(model))
    assert calls == ["of a class", "of a tensor", "of all", "of all"]


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_autograds_own_log_and_anomaly_mode_work(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = make()
    with caplog.at_level(logging.DEBUG, logger="torch.autograd.graph"):
        direct_calls.backward(loss_of(model))
    assert "MeanBackward" in caplog.text
    loss = (loss_of(model) * 0).sqrt() * float("inf") * 0
    noticed = pytest.warns(UserWarning, match="Error detected")
    with noticed, torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan"):
        direct_calls.backward(loss)


# -- step


@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"foreach": False}, {"amsgrad": True}, {"maximize": True, "foreach": True}]
)
def test_weights_are_those_of_a_step(options: dict[str, Any]) -> None:
    (one, steps), (other, direct) = make(**options), make(**options)
    for _ in range(3):
        for model, take in ((one, lambda: steps.step()), (other, lambda: direct_calls.step(direct))):
            model.zero_grad()
            loss_of(model).backward()
            take()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not any(p.requires_grad and p.grad_fn is not None for p in other.parameters())


def test_hooks_of_a_step_run(stepped: tuple[nn.Module, Any]) -> None:
    _, optimizer = stepped
    own = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    for register in (*own, register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        seen: list[Any] = []
        handle = register(lambda *given, seen=seen: seen.append(given[0]))
        direct_calls.step(optimizer)
        handle.remove()
        direct_calls.step(optimizer)
        assert seen == [optimizer]


def test_a_profiler_sees_the_step(stepped: tuple[nn.Module, Any]) -> None:
    _, optimizer = stepped
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        direct_calls.step(optimizer)
    assert any(event.key == "Optimizer.step#AdamW.step" for event in profile.key_averages())


def test_a_scheduler_sees_the_step(stepped: tuple[nn.Module, Any]) -> None:
    _, optimizer = stepped
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    direct_calls.step(optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scheduler.step()
    assert not said  # as it would be of a schedule that moved before the first step


def test_a_wrapped_step_is_called(stepped: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With `functools.wraps`, which makes it look like what it wraps, around each of what may be there."""
    _, optimizer = stepped
    calls = []

    def wrapped(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(function)
            return function(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patches:
        patches.setattr(torch.optim.AdamW, "step", wrapped(torch.optim.AdamW.step))
        direct_calls.step(optimizer)
    assert len(calls) == 1
    optimizer.step = wrapped(optimizer.step)
    direct_calls.step(optimizer)
    assert len(calls) == 2
    del optimizer.step
    LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step = wrapped(optimizer.step)
    direct_calls.step(optimizer)
    assert len(calls) == 3

    @functools.wraps(torch.optim.AdamW.step)
    def own() -> None:
        calls.append(own)
        torch.optim.AdamW.step(optimizer)

    optimizer.step = own
    direct_calls.step(optimizer)
    assert len(calls) == 4


def test_a_users_optimizer_is_stepped() -> None:
    class Halved(torch.optim.SGD):
        """Calls the step that it inherits."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)
            return super().step(closure)

    (model, optimizer), (plain, _) = make(Halved), make(torch.optim.SGD)
    loss_of(model).backward()
    loss_of(plain).backward()
    direct_calls.step(optimizer)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected - 0.05 * expected.grad, rtol=0, atol=1e-7)  # type: ignore[operator]


def test_an_optimizer_around_another_is_stepped(stepped: tuple[nn.Module, Any]) -> None:
    _, optimizer = stepped

    class Around(torch.optim.Optimizer):
        """Has nothing of `Optimizer.__init__`, as those of other trainers."""

        def __init__(self) -> None:
            self.calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            return optimizer.step()

    around = Around()
    direct_calls.step(around)
    assert around.calls == 1


def test_a_hook_may_go_while_hooks_run(stepped: tuple[nn.Module, Any]) -> None:
    _, optimizer = stepped
    calls: list[str] = []

    def once(*_: Any) -> None:
        calls.append("once")
        direct_calls.remove_step_hook(optimizer, handle)

    handle = optimizer.register_step_pre_hook(once)
    other = optimizer.register_step_pre_hook(lambda *_: calls.append("other"))
    direct_calls.step(optimizer)
    other.remove()
    direct_calls.step(optimizer)
    direct_calls.step(optimizer)
    assert calls == ["once", "other", "once"]
