"""What comes again is due when its steps, epochs or minutes say so."""

from __future__ import annotations

from tests.api import Cadence


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


def test_steps_and_epochs_are_due_at_their_multiples() -> None:
    cadence = Cadence(steps=3, epochs=2)
    assert [step for step in range(1, 10) if cadence.is_due(step)] == [3, 6, 9]
    assert [epoch for epoch in range(1, 6) if cadence.is_due(None, epoch)] == [2, 4]
    assert cadence.is_due(1, 2)
    assert cadence.is_due(3, 1)
    assert not cadence.is_due(1, 1)
    assert not cadence.is_due()


def test_what_is_not_counted_is_never_due() -> None:
    never = Cadence()
    assert not any(never.is_due(n, n) for n in range(1, 10))
    assert not never.is_due_by_the_clock()
    assert not never.goes_by_the_clock


def test_minutes_are_counted_from_the_last_time() -> None:
    clock = Clock()
    cadence = Cadence(minutes=2, clock=clock)
    assert cadence.goes_by_the_clock
    clock.now += 119.9
    assert not cadence.is_due_by_the_clock()
    clock.now += 0.2
    assert cadence.is_due_by_the_clock()
    cadence.restart()
    assert not cadence.is_due_by_the_clock()
    clock.now += 120.1
    assert cadence.is_due_by_the_clock()
    assert not cadence.is_due(2, 2)
