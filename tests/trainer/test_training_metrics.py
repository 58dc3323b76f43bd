"""Metrics that training updates go on after a resume, on any number of ranks; another optimizer is refused."""

from typing import Any

import pytest
import torch
import torchmetrics

import dream_trainer as dt
from tests.api import CheckpointError, DistributedDataLoader, computed
from tests.trainer.small import Batch, Built, Config, Samples, fused_adamw, make_config
from tests.worlds import run_world

LENGTH = 48


class Measured(Built, dt.DreamTrainer):
    """Sums, means, extremes, lists and a collection over training's samples; one of validation's beside them."""

    config: Config
    stop_after: int | None = None

    def configure_metrics(self) -> None:
        self.total = torchmetrics.SumMetric()
        self.mean = torchmetrics.MeanMetric()
        self.numbers = torchmetrics.CatMetric()
        kinds = [torchmetrics.classification.BinaryAccuracy(), torchmetrics.classification.BinaryPrecision()]
        self.scores = torchmetrics.MetricCollection(kinds)
        self.of_validation = torchmetrics.MeanMetric()

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DistributedDataLoader(Samples(LENGTH), 2, shuffle=True), DistributedDataLoader(Samples(6), 2)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        numbers = batch[2]
        self.total.update(numbers)
        self.mean.update(numbers.float(), weight=numbers.float())
        self.numbers.update(numbers.float())
        self.scores.update((numbers % 7) / 7, numbers % 2)
        if not self.is_accumulating_gradients and self.global_step + 1 == self.stop_after:
            self.request_stop()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.of_validation.update(batch[2].float())
        return {}

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, metric in self.named_metrics().items():
            found |= computed(name, metric, self.world)
        return {
            name: sorted(value.flatten().tolist()) if name == "numbers" else float(value)
            for name, value in found.items()
        }


def config() -> Config:
    checkpoint = dt.CheckpointParameters(save_every_n_epochs=None, async_save=False)
    return make_config(n_epochs=1, global_batch_size=12, val_every_n_steps=1, checkpoint=checkpoint)


def train(stop_after: int | None) -> dict[str, Any]:
    with Measured(config()) as trainer:
        trainer.stop_after = stop_after
        trainer.fit()
        return trainer.values()


def expected() -> dict[str, Any]:
    numbers = torch.arange(LENGTH)
    said, true = (numbers % 7) / 7 > 0.5, numbers % 2 == 1
    return {
        "total": float(numbers.sum()),
        "mean": pytest.approx(float((numbers * numbers).sum() / numbers.sum())),
        "numbers": [float(number) for number in numbers],
        "BinaryAccuracy": pytest.approx(float((said == true).double().mean())),
        "BinaryPrecision": pytest.approx(float(true[said].double().mean())),
        "of_validation": 2.5,
    }


@pytest.mark.pitfall(78)
@pytest.mark.parametrize(
    "worlds", [(2, 1), *(pytest.param(worlds, marks=pytest.mark.slow) for worlds in ((1, 2), (3, 2)))]
)
def test_metrics_of_training_go_on_after_a_resume(worlds: tuple[int, int]) -> None:
    before, after = worlds
    for size, stop_after in ((before, 2), (after, None)):
        found = [train(stop_after)] if size == 1 else run_world(train, size, stop_after)
    assert found == [expected()] * after


@pytest.mark.pitfall(78)
def test_another_optimizer_is_refused_by_name() -> None:
    train(2)
    refused = pytest.raises(CheckpointError, match="'optimizer' was of class SGD and is AdamW now.*init_from")
    with refused, Measured(config(), make_optimizer=fused_adamw) as trainer:
        trainer.fit()
