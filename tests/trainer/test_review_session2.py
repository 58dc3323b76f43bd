"""Signals at the instants at which a wait for data ends."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.api import Requests, Signals, preserved_random_state, seed_cpu, undisturbed_cpu_state


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()


@pytest.fixture
def load_and_get(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Loads a sample that draws; the signal comes when only a part of the generators is put back."""

    def load(number: int) -> None:
        put_back = random.setstate

        def put_back_late(state: Any) -> None:
            monkeypatch.setattr(random, "setstate", put_back)
            os.kill(os.getpid(), number)
            put_back(state)

        with preserved_random_state():
            seed_cpu(7)
            draws()
            monkeypatch.setattr(random, "setstate", put_back_late)

    return load


@pytest.mark.pitfall(32)
def test_a_wait_that_a_signal_ends_leaves_all_generators_where_they_were(load_and_get: Callable[[int], None]) -> None:
    seed_cpu(3)
    expected = draws()
    seed_cpu(3)
    signals = Signals(Requests())
    with signals.handled():
        signals.wait_for_data(lambda: load_and_get(signal.SIGTERM))
    assert signals.requests.terminated
    assert draws() == expected


@pytest.mark.pitfall(32)
def test_a_save_while_generators_are_put_back_has_them_as_they_were(load_and_get: Callable[[int], None]) -> None:
    seed_cpu(3)
    signals, found, before = Signals(Requests()), [], undisturbed_cpu_state()

    def save() -> bool:
        found.append(undisturbed_cpu_state())
        return True

    with signals.handled():
        signals.wait_for_data(lambda: load_and_get(signal.SIGUSR1), save)
    (state,) = found
    assert torch.equal(state[0], before[0])
    assert state[1] == before[1]
    np.testing.assert_equal(state[2], before[2])
    assert undisturbed_cpu_state()[1] == before[1]
