"""Schedulers that are never stepped, stepped twice, or beside another optimizer, and uses of them that are meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

import dream_trainer as dt
from tests.trainer.small import Spread, Validates, batches, make_config


class Scheduled(Spread):
    """Four windows an epoch; hands nothing over unless a test does."""

    def configure_schedulers(self) -> None:
        self.scheduler: Any = StepLR(self.optimizer, 2)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(self.model(batch[0]).square().mean())
        self.finish()
        return {}

    def finish(self) -> None:
        self.step(self.model, self.optimizer, self.scheduler)


def said(trainer: Scheduled, caplog: pytest.LogCaptureFixture) -> list[str]:
    with trainer:
        trainer.fit()
    return [line for line in caplog.messages if "schedul" in line]


def test_a_scheduler_that_nobody_steps_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Forgets(Scheduled):
        def finish(self) -> None:
            self.step(self.model, self.optimizer)

    (line,) = said(Forgets(make_config(n_epochs=3), batches(4)), caplog)
    assert line.startswith("self.scheduler has not been stepped so far, so self.optimizer keeps its learning rate.")
    assert "self.step(model, optimizer, scheduler)" in line


def test_one_that_follows_a_metric_is_named_when_no_validation_has_stepped_it(caplog: pytest.LogCaptureFixture) -> None:
    class Forgets(Validates, Scheduled):
        def configure_schedulers(self) -> None:
            self.plateau = ReduceLROnPlateau(self.optimizer)

        def finish(self) -> None:
            self.step(self.model, self.optimizer)

    (line,) = said(Forgets(make_config(n_epochs=2), batches(4), batches(2)), caplog)
    assert line.startswith("self.plateau has not been stepped so far")


def test_one_that_is_handed_to_step_and_stepped_by_hand_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Twice(Scheduled):
        def finish(self) -> None:
            super().finish()
            self.scheduler.step()

    (line,) = said(Twice(make_config(max_steps=2), batches(4)), caplog)
    assert line.startswith("self.scheduler is handed to step() and stepped by hand as well: it has gone 2 steps in 1.")

    class OncePerEpochToo(Scheduled):
        def post_epoch(self) -> None:
            self.scheduler.step()

    caplog.clear()
    (line,) = said(OncePerEpochToo(make_config(n_epochs=2), batches(4)), caplog)
    assert "as well: it has gone 5 steps in 4." in line


class Two(Scheduled):
    """Two optimizers with a scheduler each."""

    def configure_optimizers(self) -> None:
        first, *others = self.model.parameters()
        self.optimizer = torch.optim.SGD([first], lr=0.1)
        self.other = torch.optim.SGD(others, lr=0.1)

    def configure_schedulers(self) -> None:
        super().configure_schedulers()
        self.other_scheduler = StepLR(self.other, 2)

    def finish(self) -> None:
        self.step(self.model, self.optimizer, self.scheduler)
        self.step(self.model, self.other, self.other_scheduler)


def test_one_beside_an_optimizer_that_it_does_not_schedule_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Slip(Two):
        def finish(self) -> None:
            self.step(self.model, self.optimizer, self.scheduler)
            self.step(self.model, self.other, self.scheduler)

    beside, never = said(Slip(make_config(n_epochs=2), batches(4)), caplog)
    assert beside.startswith("self.scheduler was handed to step() 2 times, and its optimizer 1 times.")
    assert never.startswith("self.other_scheduler has not been stepped so far, so self.other keeps")


class PerEpoch(Scheduled):
    def finish(self) -> None:
        self.step(self.model, self.optimizer)

    def post_epoch(self) -> None:
        self.scheduler.step()


class AfterValidation(Validates, Scheduled):
    """Validates every second epoch, and steps its scheduler then."""

    def configure_schedulers(self) -> None:
        self.scheduler = ReduceLROnPlateau(self.optimizer)

    def finish(self) -> None:
        self.step(self.model, self.optimizer)

    def post_val_epoch(self, metrics: dict[str, Any]) -> None:
        self.scheduler.step(metrics["val/loss"])


class InPhases(Scheduled):
    """Its second scheduler has its turn later, as that of SWA."""

    def configure_schedulers(self) -> None:
        super().configure_schedulers()
        self.later = SWALR(self.optimizer, 0.01)


class Sequence(Scheduled):
    """Parts of a scheduler have names of their own."""

    def configure_schedulers(self) -> None:
        self.warmup = LinearLR(self.optimizer, total_iters=2)
        self.decay = CosineAnnealingLR(self.optimizer, 100)
        self.scheduler = SequentialLR(self.optimizer, [self.warmup, self.decay], [2])


class Chain(Scheduled):
    def configure_schedulers(self) -> None:
        self.scheduler = ChainedScheduler([ConstantLR(self.optimizer), ExponentialLR(self.optimizer, 0.9)])


class Fractions(Scheduled):
    """Goes by fractions of an epoch, and is in its first."""

    def configure_schedulers(self) -> None:
        self.scheduler = CosineAnnealingWarmRestarts(self.optimizer, 10)

    def finish(self) -> None:
        self.step(self.model, self.optimizer)
        self.scheduler.step(self.current_epoch + (self.batch_idx + 1) / 5)


class Bare(LRScheduler):
    """Has nothing of PyTorch's but the name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def step(self, epoch: int | None = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9


class OfItsOwn(Scheduled):
    def configure_schedulers(self) -> None:
        self.scheduler = Bare(self.optimizer)


class LateOptimizer(Two):
    """Its second optimizer begins later."""

    def finish(self) -> None:
        self.step(self.model, self.optimizer, self.scheduler)
        for parameter in self.model.parameters():
            parameter.grad = None


class SeveralTurns(Two):
    """Steps several times in a window, and all schedulers with one of the optimizers' steps, as a list."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        for _ in range(2):
            self.backward(self.model(batch[0]).square().mean())
            self.step(self.model, [self.optimizer, self.other], [self.scheduler, self.other_scheduler])
        return {}


@pytest.mark.parametrize(
    "cls", [Scheduled, PerEpoch, InPhases, Sequence, Chain, Fractions, OfItsOwn, Two, LateOptimizer, SeveralTurns]
)
def test_nothing_is_said_of_schedulers_that_are_stepped(cls: type[Scheduled], caplog: pytest.LogCaptureFixture) -> None:
    assert said(cls(make_config(n_epochs=2), batches(4)), caplog) == []


def test_nothing_is_said_before_the_validation_that_steps_a_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(n_epochs=2, val_every_n_epochs=2)
    assert said(AfterValidation(config, batches(4), batches(2)), caplog) == []


def test_steps_by_hand_between_two_fits_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    with Scheduled(make_config(n_epochs=1), batches(4)) as trainer:
        trainer.fit()
        trainer.set_limits(n_epochs=2)
        trainer.scheduler.step()
        trainer.fit()
    assert "by hand" not in caplog.text


class Stops(Validates, Scheduled):
    """Asks for an end in the validation before training."""

    def pre_val_epoch(self) -> None:
        if self.is_sanity_validation:
            self.request_stop("enough")


def test_an_end_before_the_first_step_and_an_evaluation_before_fit_are_no_error() -> None:
    with Stops(make_config(n_epochs=1, num_sanity_val_steps=1), batches(4), batches(2)) as trainer:
        trainer.fit()
        assert trainer.local_batches == 0
    evaluates = type("Evaluates", (dt.EvalMixin, Validates, Scheduled), {})
    with evaluates(make_config(n_epochs=1), batches(4), batches(2)) as trainer:
        trainer.evaluate()
        trainer.fit()
        assert trainer.global_step == 4
