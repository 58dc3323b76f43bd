"""When the state of a loader that has one is taken, and what follows where it is not."""

from collections.abc import Iterator
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import DataError
from tests.trainer.small import Alone, Batch, batches, make_config


class WithState:
    """Six batches, and how often it was asked where it is."""

    next = asked = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.next < 6:
            self.next += 1
            yield batches(6)[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Saving(Alone, dt.CheckpointMixin):
    """The same, and may be saved after any window."""


@pytest.mark.parametrize(("kind", "expected"), [(Alone, 0), (Saving, 6)])
def test_a_loaders_state_is_taken_for_windows_that_can_be_saved_alone(kind: type[Alone], expected: int) -> None:
    loader = WithState()
    trainer = kind(make_config(n_epochs=1), loader)
    trainer.fit()
    assert (trainer.global_step, loader.asked) == (6, expected)


class FailsInStepThree:
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)  # type: ignore[misc]


@pytest.mark.pitfall(75)
def test_after_an_exception_only_a_kept_state_lets_a_trainer_go_on() -> None:
    trainer = type("Keeps", (FailsInStepThree, Saving), {})(make_config(n_epochs=1), WithState())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trainer.fit()
    assert trainer.seen == [[0, 1], [2, 3]]
    trainer = type("Forgets", (FailsInStepThree, Alone), {})(make_config(n_epochs=1), WithState())
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    with pytest.raises(DataError, match="add CheckpointMixin"):
        trainer.fit()
    assert trainer.seen == [[0, 1], [2, 3]]
