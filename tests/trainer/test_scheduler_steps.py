"""Schedulers that are never stepped, stepped twice, or beside another optimizer, and uses of them that are meant."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import SWALR

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


class Forgets(Scheduled):
    def finish(self) -> None:
        self.step(self.model, self.optimizer)


class ForgetsPlateau(Validates, Forgets):
    def configure_schedulers(self) -> None:
        self.plateau = ReduceLROnPlateau(self.optimizer)


class Twice(Scheduled):
    def finish(self) -> None:
        super().finish()
        self.scheduler.step()


class Two(Scheduled):
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


class Slip(Two):
    def finish(self) -> None:
        self.step(self.model, self.optimizer, self.scheduler)
        self.step(self.model, self.other, self.scheduler)


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (Forgets, ["self.scheduler has not been stepped so far, so self.optimizer keeps its learning rate."]),
        (ForgetsPlateau, ["self.plateau has not been stepped so far"]),
        (Twice, ["self.scheduler is passed to step() and stepped by hand as well: it has gone 2 steps in 1."]),
        (Slip, ["self.other_scheduler has not been stepped so far, so self.other keeps"]),
    ],
)
def test_a_wrong_step_is_named_once(cls: type[Scheduled], told: list[str], caplog: pytest.LogCaptureFixture) -> None:
    val = batches(2) if issubclass(cls, Validates) else None
    for line, start in zip(said(cls(make_config(n_epochs=2), batches(4), val), caplog), told, strict=True):
        assert line.startswith(start)


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
    def configure_schedulers(self) -> None:
        self.warmup = LinearLR(self.optimizer, total_iters=2)
        self.decay = CosineAnnealingLR(self.optimizer, 100)
        self.scheduler = SequentialLR(self.optimizer, [self.warmup, self.decay], [2])


class SeveralTurns(Two):
    """Steps several times in a window, and all schedulers with one of the optimizers' steps, as a list."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        for _ in range(2):
            self.backward(self.model(batch[0]).square().mean())
            self.step(self.model, [self.optimizer, self.other], [self.scheduler, self.other_scheduler])
        return {}


@pytest.mark.parametrize("cls", [Scheduled, InPhases, Sequence, Two, SeveralTurns, AfterValidation])
def test_nothing_is_said_of_schedulers_that_are_stepped(cls: type[Scheduled], caplog: pytest.LogCaptureFixture) -> None:
    val = batches(2) if issubclass(cls, Validates) else None
    assert said(cls(make_config(n_epochs=2, val_every_n_epochs=2), batches(4), val), caplog) == []
