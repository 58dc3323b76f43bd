"""GarbageCollection: collects when it says, at no other time, and gives the collector back."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api import GarbageCollection
from tests.trainer.small import Alone, Batch, batches, fit, make_config


class Watches(Alone):
    """Notes (steps completed, generation) of each collection within training."""

    collected: list[tuple[int, int]]

    def pre_epoch(self) -> None:
        self.collected = []

        def note(phase: str, info: dict[str, Any]) -> None:
            if phase == "start":
                self.collected.append((self.global_step, info["generation"]))

        self._note = note
        gc.callbacks.append(note)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        self.litter = [[] for _ in range(5000)]  # more than the threshold of automatic collection
        if batch_idx == 8:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)

    def post_epoch(self) -> None:
        gc.callbacks.remove(self._note)


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    assert gc.isenabled()
    before = list(gc.callbacks)
    yield
    gc.enable()
    gc.callbacks[:] = before


def test_it_collects_at_the_chosen_steps_and_at_no_other_time() -> None:
    trainer = Watches(make_config(n_epochs=1, callbacks=[GarbageCollection(2, 6)]), batches(8))
    fit(trainer)
    assert trainer.collected == [(2, 2), (4, 1), (6, 2), (8, 1)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_after_an_exception_the_collector_is_as_it_was() -> None:
    trainer = Watches(make_config(n_epochs=1, callbacks=[GarbageCollection(), GarbageCollection()]), batches(9))
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
