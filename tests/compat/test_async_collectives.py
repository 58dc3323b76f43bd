"""A collective's result that may still run goes into compiled code as a plain tensor whose gradient comes back."""

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tests.api import waited


def test_what_was_waited_for_is_plain_and_hands_its_gradient_on_each_time() -> None:
    running = AsyncCollectiveTensor(torch.arange(3.0)).requires_grad_()
    factors = torch.tensor([2.0, 3.0, 5.0])
    for times in (1, 2):
        plain = waited(running)
        assert type(plain) is torch.Tensor
        assert torch.equal(plain, torch.arange(3.0))
        torch.compile(lambda x: (x * factors).sum(), backend="aot_eager")(plain).backward()
        assert torch.equal(running.grad, times * factors)


def test_everything_else_is_left_as_it_is() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    for value in (tensor, None, "text", [tensor]):
        assert waited(value) is value
