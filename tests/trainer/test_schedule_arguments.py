"""PyTorch's schedulers whose arguments change where a run goes on, against PyTorch's with the new ones all along."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs

import dream_trainer as dt
from dream_trainer.callbacks import Every
from dream_trainer.config.branch_parameters import BranchParameters
from dream_trainer.errors import CheckpointError
from dream_trainer.trainer import saved_state
from tests.trainer import saves
from tests.trainer.small import Batch

SHORT, LONG = 6, 20
RATE = 0.05


def warmup_and_cosine(optimizer: Optimizer, total: int) -> lrs.SequentialLR:
    warm = total // 2
    parts = [lrs.LinearLR(optimizer, 0.01, total_iters=warm), lrs.CosineAnnealingLR(optimizer, total - warm)]
    return lrs.SequentialLR(optimizer, parts, [warm])


def chained(optimizer: Optimizer, total: int) -> lrs.ChainedScheduler:
    parts = [lrs.LinearLR(optimizer, 0.1, total_iters=total), lrs.ExponentialLR(optimizer, 0.9)]
    return lrs.ChainedScheduler(parts, optimizer)


def chained_sequence(optimizer: Optimizer, total: int) -> lrs.ChainedScheduler:
    return lrs.ChainedScheduler([warmup_and_cosine(optimizer, total), lrs.StepLR(optimizer, total // 3)], optimizer)


KINDS: dict[str, Callable[[Optimizer, int], lrs.LRScheduler]] = {
    "step": lambda optimizer, total: lrs.StepLR(optimizer, total // 3),
    "multi-step": lambda optimizer, total: lrs.MultiStepLR(optimizer, [total // 3, total // 2]),
    "constant": lambda optimizer, total: lrs.ConstantLR(optimizer, 0.5, total_iters=total // 2),
    "linear": lambda optimizer, total: lrs.LinearLR(optimizer, 0.1, total_iters=total),
    "exponential": lambda optimizer, total: lrs.ExponentialLR(optimizer, 0.1 ** (1 / total)),
    "polynomial": lambda optimizer, total: lrs.PolynomialLR(optimizer, total, 2.0),
    "cosine": lambda optimizer, total: lrs.CosineAnnealingLR(optimizer, total, 0.001),
    "restarts": lambda optimizer, total: lrs.CosineAnnealingWarmRestarts(optimizer, total // 3, 2),
    "cyclic": lambda optimizer, total: lrs.CyclicLR(optimizer, RATE, 0.2, total // 3),
    "one cycle": lambda optimizer, total: lrs.OneCycleLR(optimizer, 0.2, total + 1),
    "multiplicative": lambda optimizer, total: lrs.MultiplicativeLR(optimizer, lambda step: 1 - step / (2 * total)),
    "higher cycle": lambda optimizer, total: lrs.OneCycleLR(optimizer, total / 100, 30, div_factor=total),
    "higher base": lambda optimizer, total: lrs.CyclicLR(optimizer, total / 100, 0.9, 9),
    "sequence": warmup_and_cosine,
    "chain": chained,
    "chain of a sequence": chained_sequence,
}
NAMED = {
    "step": "step_size=6 instead of 2",
    "multi-step": "milestones=[6, 10] instead of [2, 3]",
    "cosine": "scheduler (CosineAnnealingLR) is now built with T_max=20 instead of 6.",
    "restarts": "T_0=6 instead of 2",
    "one cycle": "total_steps=21 instead of 7.",
    "multiplicative": "(MultiplicativeLR) is now built with factors whose product so far is 0.5735 instead of 0.1114.",
    "higher cycle": "is now built with max_lr=0.2 instead of 0.06",
    "higher base": "is now built with base_lrs=[0.2] instead of [0.06]",
    "sequence": "milestones=[10] instead of [3], schedulers[0].total_iters=10 instead of 3, "
    "schedulers[1].T_max=10 instead of 3.",
}


class Scheduled(saves.Saves):
    """Notes the learning rate and momentum of each step."""

    make: Callable[[Optimizer, int], Any]

    def __init__(self, config: saves.Config) -> None:
        super().__init__(config)
        self.used: list[tuple[float, float]] = []

    def configure_schedulers(self) -> None:
        assert self.total_steps is not None
        self.scheduler = type(self).make(self.optimizer, self.total_steps)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.used.append(used(self.optimizer))
        loss = self.model(batch[0]).square().mean()
        self.backward(loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.model(batch[0]).square().mean()}


def used(optimizer: Optimizer) -> tuple[float, float]:
    group = optimizer.param_groups[0]
    return group["lr"], group["momentum"]


def trainer_of(make: Callable[[Optimizer, int], Any]) -> type[Scheduled]:
    return type("Scheduled", (Scheduled,), {"make": staticmethod(make)})


def make_config(experiment: str, steps: int, rate: float = RATE, **checkpoint: Any) -> saves.Config:
    return saves.make_config(
        experiment=experiment,
        learning_rate=rate,
        training={"max_steps": steps, "val_every_n_epochs": None},
        **{"save_every_n_epochs": None} | checkpoint,
    )


def fit(trainer: Scheduled) -> Scheduled:
    with trainer:
        trainer.fit()
    return trainer


def by_hand(
    make: Callable[[Optimizer, int], Any], total: int, steps: int, rate: float = RATE
) -> list[tuple[float, float]]:
    """What PyTorch's own loop uses in each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate, momentum=0.9)
    scheduler, found = make(optimizer, total), []
    for _ in range(steps):
        found.append(used(optimizer))
        optimizer.step()
        scheduler.step()
    return found


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_new_arguments_hold_after_new_limits_a_resume_and_in_a_branch(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As if they had held from the start, also where the old ones had led to another rate, or to none."""
    make = KINDS[kind]
    trained, expected = trainer_of(make), by_hand(make, SHORT, SHORT) + by_hand(make, LONG, LONG)[SHORT:]
    limits = trained(make_config("limits", SHORT))
    limits.fit()
    limits.set_limits(max_steps=LONG)
    limits.fit()
    limits.close()
    assert limits.used == expected
    said = [record.message for record in caplog.records if record.message.startswith("scheduler (")]
    first = fit(trained(make_config("run", SHORT)))
    resumed = fit(trained(make_config("run", LONG)))
    assert first.used + resumed.used == expected
    branch = fit(trained(make_config("branch", LONG, resume=f"{first.checkpoint_dir}/step_{SHORT:08d}")))
    assert branch.used == expected[SHORT:]
    assert len(said) == 1
    assert NAMED.get(kind, "") in said[0]
    assert f"at its step {SHORT} the learning rate is {expected[SHORT][0]:.4g}, and was" in said[0]
    lines = [record.message for record in caplog.records if record.message.startswith("scheduler (")]
    assert lines == said * 3


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_arguments_it_had_a_run_goes_on_bit_for_bit_and_silently(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make = KINDS[kind]
    trained = trainer_of(make)

    def stop_at_six(trainer: Any) -> None:
        trainer.request_stop("the test says so")

    config = make_config("run", LONG)
    config.callbacks = dt.CallbackCollection([Every(SHORT, "steps", stop_at_six)])
    first = fit(trained(config))
    assert first.global_step == SHORT
    resumed = fit(trained(make_config("run", LONG)))
    assert first.used + resumed.used == by_hand(make, LONG, LONG)
    assert not [line for line in caplog.messages if line.startswith("scheduler")]


def test_another_learning_rate_is_no_argument_and_the_checkpoint_s_goes_on_under_new_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained = trainer_of(KINDS["cosine"])
    fit(trained(make_config("run", SHORT)))
    same = fit(trained(make_config("run", SHORT + 1, rate=0.7)))
    assert same.used == by_hand(KINDS["cosine"], SHORT + 1, SHORT + 1)[SHORT:]
    assert "this config has lr=0.7, and the checkpoint's 0.05 goes on" in caplog.text


def test_another_kind_of_schedule_is_named_and_stands_at_its_step(caplog: pytest.LogCaptureFixture) -> None:
    fit(trainer_of(KINDS["step"])(make_config("run", SHORT)))
    resumed = fit(trainer_of(KINDS["cosine"])(make_config("run", LONG)))
    assert resumed.used == by_hand(KINDS["cosine"], LONG, LONG)[SHORT:]
    assert "scheduler is now CosineAnnealingLR instead of StepLR." in caplog.text


def test_a_schedule_that_does_not_reach_its_step_is_refused_by_name() -> None:
    trained = trainer_of(lambda optimizer, total: lrs.OneCycleLR(optimizer, 0.2, 30 - total))
    fit(trained(make_config("run", 20 - SHORT)))
    with pytest.raises(CheckpointError, match=r"total_steps=5 instead of 16.*does not reach to its step 14"):
        fit(trained(make_config("run", 25)))


class Plateau(Scheduled):
    """Validates after each step, with a loss that never falls."""

    patience = 2

    def configure_schedulers(self) -> None:
        self.scheduler = lrs.ReduceLROnPlateau(self.optimizer, patience=self.patience, factor=0.5)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.used.append(used(self.optimizer))
        loss = self.model(batch[0]).square().mean()
        self.backward(loss)
        self.step(self.model, self.optimizer)
        self.scheduler.step(1.0)
        return {"loss": loss}


def plateau_by_hand(patiences: list[int]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler, rates = lrs.ReduceLROnPlateau(optimizer, patience=2, factor=0.5), []
    for scheduler.patience in patiences:
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1.0)
    return rates


def test_a_plateau_keeps_what_it_has_waited_and_takes_its_new_patience(caplog: pytest.LogCaptureFixture) -> None:
    first = fit(Plateau(make_config("run", 5)))
    patient = type("Patient", (Plateau,), {"patience": 4})
    resumed = fit(patient(make_config("run", 15)))
    rates = [rate for rate, _ in first.used + resumed.used]
    assert rates == plateau_by_hand([2] * 5 + [4] * 10)
    assert (
        "scheduler (ReduceLROnPlateau) is now built with patience=4 instead of 2. This holds from here on."
        in caplog.text
    )
    with pytest.raises(CheckpointError, match="only one of them follows a metric"):
        fit(trainer_of(KINDS["cosine"])(make_config("run", 20)))


def test_several_schedules_of_one_optimizer_take_their_arguments_and_go_on_from_the_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Two(Scheduled):
        gammas = (0.9, 0.8)

        def configure_schedulers(self) -> None:
            first, second = (lrs.ExponentialLR(self.optimizer, gamma) for gamma in self.gammas)
            self.schedules = [first, second]

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.used.append(used(self.optimizer))
            loss = self.model(batch[0]).square().mean()
            self.backward(loss)
            self.step(self.model, self.optimizer, self.schedules)
            return {"loss": loss}

    fit(Two(make_config("run", 3)))
    other = type("Other", (Two,), {"gammas": (0.9, 0.5)})
    resumed = fit(other(make_config("run", 6)))
    expected = [RATE * 0.72**3 * 0.45**step for step in range(3)]
    assert [rate for rate, _ in resumed.used] == pytest.approx(expected, rel=1e-12)
    assert "schedules.1 (ExponentialLR) is now built with gamma=0.5 instead of 0.8" in caplog.text


def test_schedules_that_are_part_of_an_assigned_one_are_given_back_with_it() -> None:
    class Named(Scheduled):
        def configure_schedulers(self) -> None:
            assert self.total_steps is not None
            warm = self.total_steps // 2
            self.warmup = lrs.LinearLR(self.optimizer, 0.01, total_iters=warm)
            self.cosine = lrs.CosineAnnealingLR(self.optimizer, self.total_steps - warm)
            self.scheduler = lrs.SequentialLR(self.optimizer, [self.warmup, self.cosine], [warm])

    fit(Named(make_config("run", SHORT)))
    resumed = fit(Named(make_config("run", LONG)))
    assert resumed.used == by_hand(warmup_and_cosine, LONG, LONG)[SHORT:]


def test_a_checkpoint_of_before_arguments_were_kept_is_taken_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = trainer_of(KINDS["cosine"])
    with monkeypatch.context() as before:
        before.setattr(saved_state, "built_schedules", lambda schedulers: {})
        fit(trained(make_config("run", SHORT)))
    resumed = fit(trained(make_config("run", LONG)))
    assert resumed.used == by_hand(lambda optimizer, _: KINDS["cosine"](optimizer, SHORT), LONG, LONG)[SHORT:]


def test_words_of_a_branch_begin_a_schedule_anew_at_the_base_rate_though_the_new_run_has_none() -> None:
    first = fit(
        trainer_of(lambda optimizer, total: lrs.LambdaLR(optimizer, lambda step: 1 - step / total))(
            make_config("run", SHORT)
        )
    )
    path = f"{first.checkpoint_dir}/step_{SHORT:08d}"

    class Constant(Scheduled):
        def configure_schedulers(self) -> None:
            pass

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.used.append(used(self.optimizer))
            loss = self.model(batch[0]).square().mean()
            self.backward(loss)
            self.step(self.model, self.optimizer)
            return {"loss": loss}

    words = BranchParameters(schedule="new")
    branch = fit(Constant(make_config("branch", SHORT + 2, resume=path, branch=words)))
    assert branch.used == [(RATE, 0.9)] * 2
