"""Seeded generators whose draws are seen."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.api import GENERATORS, WatchedSeeds, preserved_random_state

DRAWS: list[tuple[str, Callable[[], Any]]] = [
    ("python", random.random),
    ("python", lambda: random.getrandbits(1)),
    ("python", lambda: random.gauss(0, 1)),
    ("python", lambda: [random.getrandbits(32) for _ in range(624)]),  # as many words as the generator holds
    ("python", lambda: random.seed(5)),
    ("numpy", np.random.rand),
    ("numpy", np.random.randn),
    ("numpy", lambda: np.random.seed(5)),
    ("torch", lambda: torch.rand(1)),
    ("torch", lambda: torch.randn(1, dtype=torch.float64)),
    ("torch", lambda: torch.manual_seed(5)),
]


@pytest.mark.parametrize(("name", "draw"), DRAWS)
def test_a_draw_is_seen_and_the_others_are_where_they_were(name: str, draw: Callable[[], Any]) -> None:
    with preserved_random_state():
        seeds = WatchedSeeds(3)
        assert not seeds.drawn()
        seeds.seed(GENERATORS)
        first = draw()
        assert seeds.drawn() == {name}
        seeds.seed(GENERATORS)
        again = draw()
    assert first == again or first is None
