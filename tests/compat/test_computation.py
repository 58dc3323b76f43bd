"""Tensors have one number if the same operations made them of the same ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.api import Computation


def number(compute: Callable[[Tensor, Tensor], Tensor]) -> int:
    x, y = torch.empty(3, 4, device="meta"), torch.empty(3, 4, device="meta")
    computation = Computation()
    computation.name({x: "x", y: "y"})
    with computation:
        return computation.number_of(compute(x, y))


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z += y
    return z


SAME = [
    (lambda x, y: x + y, lambda x, y: torch.add(x, y)),
    (lambda x, y: (x * 2, x + y)[1], lambda x, y: x + y),
    (lambda x, y: x.split(2, dim=1)[1], lambda x, y: (y.sum(), x.split(2, dim=1))[1][1]),
    (lambda x, y: x + (y + 1).new_ones(()), lambda x, y: x + y.new_ones(())),
    (add_in_place, add_in_place),
]
OTHER = [
    (lambda x, y: x + y, lambda x, y: y + x),
    (lambda x, y: x * 2, lambda x, y: x * 3),
    (lambda x, y: x[0], lambda x, y: x[1]),
    (lambda x, y: x.split(2, dim=1)[0], lambda x, y: x.split(2, dim=1)[1]),
    (lambda x, y: x.clone(), add_in_place),
    (lambda x, y: x + torch.tensor(1.0), lambda x, y: x + torch.tensor(2.0)),
]


@pytest.mark.parametrize("pair", range(len(SAME)))
def test_equal_computations_have_one_number(pair: int) -> None:
    one, other = SAME[pair]
    assert number(one) == number(other)


@pytest.mark.parametrize("pair", range(len(OTHER)))
def test_other_computations_have_other_numbers(pair: int) -> None:
    one, other = OTHER[pair]
    assert number(one) != number(other)
