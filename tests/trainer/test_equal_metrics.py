"""Values that a validation ends with are the same on all ranks, or named before anyone goes by them."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch.optim.lr_scheduler import ReduceLROnPlateau

import dream_trainer as dt
from tests.trainer.small import Batch, Samples, Spread, Validates, fit, make_config, outcome, sharded, told
from tests.trainer.test_rank_differences import loader
from tests.worlds import run_world


class Untold(torchmetrics.Metric):
    """Counts in a plain attribute, which torchmetrics does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def update(self, values: torch.Tensor) -> None:
        self.values += values.flatten().tolist()

    def compute(self) -> torch.Tensor:
        return torch.tensor(sum(self.values) / len(self.values), dtype=torch.float64)


class Rounded(torchmetrics.MeanMetric):
    """Computes over the samples of all ranks, and on each in another order of additions."""

    def compute(self) -> torch.Tensor:
        return super().compute() * (1 + 1e-7 * int(os.environ["RANK"]))


def own(cls: type = torchmetrics.MeanMetric, **options: Any) -> Any:
    return cls(**options).set_dtype(torch.float64)


class Measures(Validates, dt.EvalMixin):
    """Goes by the mean of the samples' numbers, measured by what `make` makes."""

    make: Callable[[], Any]

    def configure_metrics(self) -> None:
        self.number = self.make()

    def configure_schedulers(self) -> None:
        self.plateau = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.heard: list[dict[str, float]] = []

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.number.update(batch[2].double())
        return super().validation_step(batch, batch_idx)

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.heard.append(metrics)
        self.plateau.step(metrics["val/number"])


class Replicas(Measures, Spread):
    config: Any


def run(cls: type, make: Callable[[], Any], sanity: int = 0) -> Any:
    config = make_config(n_epochs=2, num_sanity_val_steps=sanity)
    trainer = cls(config, loader(), loader(14))
    trainer.make = make
    message = outcome(trainer)
    heard, rate, steps = trainer.heard, trainer.optimizer.param_groups[0]["lr"], trainer.global_step
    trainer.close()
    return message, heard, rate, steps


def run_all() -> list[Any]:
    found = [
        run(cls, make)
        for cls in (Replicas, sharded(Replicas))
        for make in (lambda: own(sync_on_compute=False), Untold, own, lambda: own(Rounded))
    ]
    return [*found, run(Replicas, lambda: own(sync_on_compute=False), sanity=2)]


@pytest.mark.pitfall(91)
def test_a_metric_that_ranks_compute_alone_is_named_before_anyone_goes_by_it() -> None:
    first, second = run_world(run_all, 2)
    mean = Samples(14).y.new_tensor(range(14)).mean().item()
    assert [one[0] for one in first] == [one[0] for one in second]
    for index, (message, heard, _, steps) in enumerate(first):
        other = second[index]
        if index in (2, 3, 6, 7):  # computed over all ranks
            assert message == "trained"
            assert heard == other[1]
            assert heard[0]["val/number"] == pytest.approx(mean, abs=1e-12)
            assert first[index][2:] == other[2:] == (0.05, 6)
        else:
            assert message.startswith("RanksDifferError: ")
            values = re.search(r"that: val/number \(([\d.]+) on rank 0; ([\d.]+) on rank 1\)\. ", message)
            assert values is not None, message
            if index != 8:  # each rank has one half
                assert sum(map(float, values.groups())) / 2 == pytest.approx(mean, abs=1e-12)
            assert "sync_on_compute" in message
            assert heard == other[1] == []
            assert steps == (0 if index == 8 else 3)


class StepsByItself(Replicas, dt.CheckpointMixin):
    """Goes by a number that its rank has taken for itself."""

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        for value in (1.0, 2.0) if self.world.rank else (2.0, 1.0):
            self.plateau.step(value)


def rates() -> list[str]:
    config = make_config(n_epochs=2, checkpoint=dt.CheckpointParameters(save_every_n_epochs=1))
    trainer = StepsByItself(config, loader(), loader(14))
    trainer.make = own
    with told() as lines:
        fit(trainer)
    return [line for line in lines if "on a resume" in line]


@pytest.mark.pitfall(91)
def test_learning_rates_that_differ_by_rank_are_named_at_the_next_save() -> None:
    (line,), nothing = run_world(rates, 2)
    assert nothing == []
    assert "the schedule plateau" in line
    assert "learning rates of optimizer" in line
