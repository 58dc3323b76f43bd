"""Seeded generators whose draws are seen."""

import copy
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.api import (
    GENERATORS,
    WatchedSeeds,
    preserved_random_state,
    seed_cpu,
    undisturbed_cpu_state,
    watched_random_state,
)

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
        assert not WatchedSeeds(3).drawn()
        seeds = WatchedSeeds(3)
        first = draw()
        assert seeds.drawn() == {name}
        WatchedSeeds(3)
        again = draw()
        for looks in (0, 1, 100):
            seed_cpu(4)
            with (watched := watched_random_state()):
                assert not any(watched.drawn(GENERATORS) for _ in range(looks))
                draw()
                assert watched.drawn(GENERATORS) == {name}
    assert first == again or first is None


def test_a_draw_of_half_a_pair_of_normal_numbers_is_seen() -> None:
    random.gauss(0, 1)
    with (watched := watched_random_state()):
        random.gauss(0, 1)
        assert watched.drawn(GENERATORS) == {"python"}


def test_an_interrupt_while_a_watch_begins_leaves_all_streams_where_they_were() -> None:
    seed_cpu(3)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    seed_cpu(3)
    watched = watched_random_state()
    with patch.object(random, "Random", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        watched.__enter__()
    assert not watched.is_inside
    assert undisturbed_cpu_state()[1] == random.getstate()
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_pythons_stream_outside_of_blocks_is_as_without_them() -> None:
    """With draws that end at each word of the generator's state, and in half a pair of normal numbers."""
    alone, kept = random.Random(5), random.Random()
    random.seed(5)
    for turn in range(4000):
        words, is_normal = turn % 4, turn % 5 == 0
        assert not words or random.getrandbits(32 * words) == alone.getrandbits(32 * words)
        assert not is_normal or random.gauss(0, 1) == alone.gauss(0, 1)
        with preserved_random_state():
            seed_cpu(turn)
            kept.setstate(undisturbed_cpu_state()[1])
            assert random.random() == random.Random(turn).random()
        alone_now = copy.copy(alone)
        assert kept.getrandbits(32 * 1300) == alone_now.getrandbits(32 * 1300)
        assert kept.gauss_next == alone.gauss_next
