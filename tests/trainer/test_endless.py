"""Runs that would never end: their limit is never reached, or their data end before their window does."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer.events import sanity_checks
from tests.api import BatchKey, DataError, DistributedDataLoader, RankBatchSampler, StepError, WindowFeed
from tests.trainer.small import Alone, Batch, Samples, make_config

pytestmark = pytest.mark.pitfall(85)


class ByItself(Alone):
    """Plain PyTorch in training_step, with the gradients cleared afterwards."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        assert self.local_batches < 1000, "endless"
        x, y, _ = batch
        mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {}


class Idle(Alone):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        assert self.local_batches < 1000, "endless"
        return {}


def fit(kind: type[Alone], length: int = 8, **training: Any) -> dt.BaseTrainer:
    with kind(make_config(**training), DistributedDataLoader(Samples(length), 2)) as trainer:
        trainer.fit()
    return trainer


def test_steps_that_nobody_counts_are_an_error_under_a_limit_in_steps() -> None:
    with pytest.raises(StepError, match=r"max_steps=3 never comes: of 1 trained.*self\.step\(model, optimizer\)"):
        fit(ByItself, max_steps=3)
    assert fit(ByItself, max_steps=3, n_epochs=2).local_batches == 8


def test_a_run_that_never_steps_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanity_checks, "BATCHES_WITHOUT_STEP", 40)
    with pytest.raises(StepError, match="max_steps=3 never comes: of 40 trained"):
        fit(Idle, max_steps=3)
    assert fit(Idle, n_epochs=12).local_batches == 48


def test_an_order_that_yields_too_little_is_an_error() -> None:
    whole = RankBatchSampler._batches

    def short(self: RankBatchSampler, epoch: int, first: int, end: int) -> Iterator[BatchKey]:
        return iter(list(whole(self, epoch, first, end))[:-1])

    taken = iter(range(100))  # an endless run takes more windows
    take = WindowFeed.take

    def counted(self: WindowFeed) -> Any:
        next(taken)
        return take(self)

    with (
        mock.patch.object(RankBatchSampler, "_batches", short),
        mock.patch.object(WindowFeed, "take", counted),
        pytest.raises(DataError, match="ended in a window, with 0 of 1 batches"),
    ):
        fit(Alone, n_epochs=1)
