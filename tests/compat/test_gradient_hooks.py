"""Hooks on gradients are kept where PyTorch keeps them, and follow a parameter that gets other values by a swap."""

import torch
import torch.nn as nn
from torch import Tensor

from tests.api import after_accumulation, has_hooks, keep_hooks, without_hooks


def test_hooks_set_before_a_swap_and_after_it_are_called_until_they_are_removed() -> None:
    parameter, calls = nn.Parameter(torch.zeros(2, device="meta")), list[str]()

    def note(name: str) -> None:
        calls.append(name)

    def set_both(name: str) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            parameter.register_hook(lambda _: note(name)),
            parameter.register_post_accumulate_grad_hook(lambda _: note(f"{name}, accumulated")),
        ]

    handles = set_both("before")
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(2)))
    keep_hooks(parameter)
    handles += set_both("after")
    parameter.sum().backward()
    assert calls == ["before", "after", "before, accumulated", "after, accumulated"]
    assert has_hooks(parameter)
    for handle in handles:
        handle.remove()
    parameter.sum().backward()
    assert len(calls) == 4
    assert not has_hooks(parameter)


def test_kinds_are_told_apart_and_those_after_accumulation_are_called_where_there_is_a_gradient() -> None:
    called: list[Tensor] = []
    changed, accumulated, neither = (nn.Parameter(torch.ones(1)) for _ in range(3))
    changed.register_hook(lambda gradient: gradient)
    accumulated.register_post_accumulate_grad_hook(called.append)
    assert [has_hooks(one) for one in (changed, accumulated, neither)] == [True, True, False]
    after_accumulation([changed, accumulated, neither])
    assert called == []
    accumulated.grad = torch.ones(1)
    after_accumulation([changed, accumulated, neither])
    assert called == [accumulated]


def test_a_gradient_can_be_computed_without_them() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: gradient * 3)

    def gradient() -> list[float]:
        return torch.autograd.grad(parameter.sum(), parameter)[0].tolist()

    with without_hooks([parameter, torch.ones(2)]):
        assert gradient() == [1, 1]
    assert gradient() == [3, 3]
