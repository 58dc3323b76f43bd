"""Limits that are raised between two calls of `fit` on one trainer: the run is the one that had them from the start."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import dream_trainer as dt
from tests.api import ConfigError, Limits, RanksDifferError, StepError
from tests.trainer import resumable, small
from tests.trainer.resumable import EPOCHS, LAST_STEP, STEPS_PER_EPOCH, Resumable, closed, differences, make_config
from tests.trainer.small import Alone, batches
from tests.worlds import run_world

NO_STEPS: Limits = {"max_steps": None, "n_epochs": EPOCHS}
PLANS: dict[str, tuple[dict[str, Any], Sequence[Limits]]] = {
    "epochs": ({"n_epochs": 1}, [{"n_epochs": EPOCHS}]),
    "from nothing": ({"n_epochs": 0}, [{"n_epochs": EPOCHS}]),
    "steps": ({"max_steps": 1}, [{"max_steps": 3}, {"max_steps": STEPS_PER_EPOCH}, {"max_steps": LAST_STEP}]),
    "another kind": ({"max_steps": STEPS_PER_EPOCH + 1}, [NO_STEPS]),
    "samples": ({"max_samples": 40}, [{"max_samples": None}]),
}
AT_TWO = {"samples": 93}


class Cosine(Resumable):
    """Its schedule follows the length of the run."""

    def configure_schedulers(self) -> None:
        total = self.planned_steps
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 - step / (total + 1))  # type: ignore[assignment]


def train_with_limits(config: Any, raised: Sequence[Limits]) -> dict[str, Any]:
    trainer = Resumable(config)
    trainer.fit()
    for limits in raised:
        trainer.set_limits(**limits)
        trainer.fit()
    return closed(trainer)


def run_plans(own: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    found = {"straight": resumable.train(make_config("straight", own=own))}
    for name in names:
        first, raised = PLANS[name]
        found[name] = train_with_limits(make_config(name, own=own, **first), raised)
    return found


def test_a_run_whose_limits_were_raised_is_the_straight_run_bit_for_bit() -> None:
    found = run_plans({"workers": 0}, PLANS)
    assert {name: differences(run, found["straight"]) for name, run in found.items()} == {name: [] for name in found}


def test_on_two_sharded_ranks_too_and_ranks_that_set_different_limits_are_an_error(all_cases: bool) -> None:
    for found in run_world(run_plans_and_differ, 2, list(PLANS) if all_cases else ["steps"]):
        error = found.pop("error")
        assert {name: differences(run, found["straight"]) for name, run in found.items()} == {n: [] for n in found}
        assert "n_epochs (3 on rank 0; 4 on rank 1)" in error


def run_plans_and_differ(names: list[str]) -> dict[str, Any]:
    found = run_plans(AT_TWO | {"workers": 0}, names)
    with small.Spread(small.make_config(n_epochs=1), torch.utils.data.DataLoader(small.Samples(8), 2)) as trainer:
        trainer.fit()
        with pytest.raises(RanksDifferError) as error:
            trainer.set_limits(n_epochs=3 + trainer.world.rank)
    return found | {"error": str(error.value)}


def test_schedules_follow_the_new_end_as_those_of_a_restart_do(caplog: pytest.LogCaptureFixture) -> None:
    def run(experiment: str, n_epochs: int) -> Cosine:
        config = make_config(experiment, n_epochs=n_epochs, own={"workers": 0})
        trainer = Cosine(config)
        trainer.fit()
        return trainer

    first = closed(run("restarted", 1))
    restarted = closed(run("restarted", EPOCHS))
    restarted["record"] = first["record"] + restarted["record"]
    raised = run("raised", 1)
    raised.set_limits(n_epochs=EPOCHS)
    assert raised.total_steps == LAST_STEP
    assert raised.config.training_parameters.n_epochs == EPOCHS
    assert "instead of total_steps=6 and max_tokens=None: its schedules (scheduler) were rebuilt" in caplog.text
    raised.fit()
    rates = [step["lr"] for step in raised.record]
    assert rates[STEPS_PER_EPOCH + 1 :] == pytest.approx([0.02 * (1 - step / 13) for step in range(7, 12)], rel=1e-12)
    assert differences(closed(raised), restarted) == []
    assert raised.checkpoints()[-1].config["training_parameters"]["n_epochs"] == EPOCHS


def test_limits_set_before_the_first_fit_count() -> None:
    data = batches(2)
    with Alone(small.make_config(n_epochs=5), data) as trainer:
        trainer.set_limits(n_epochs=1, max_time=timedelta(hours=1))
        trainer.fit()
        assert (trainer.current_epoch, trainer.total_steps) == (1, 2)
        small.assert_same_weights(small.weights(trainer.model), small.by_hand([[batch] for batch in data]))


def test_misuse_is_refused_by_name() -> None:
    class Sets(dt.Callback):
        def post_train_step(self, trainer: Any) -> None:
            trainer.set_limits(n_epochs=2)

    config = small.make_config(n_epochs=1, callbacks=[Sets()])
    with Alone(config, batches(1)) as trainer:
        with pytest.raises(StepError, match=r"set_limits\(\) was called inside fit\(\)"):
            trainer.fit()
        with pytest.raises(TypeError, match="no limit 'epochs'. Use n_epochs, max_steps"):
            trainer.set_limits(epochs=2)  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match="n_epochs=-1"):
            trainer.set_limits(n_epochs=-1)
        other = Alone(config, batches(1))
        with pytest.raises(ConfigError, match="another trainer, which is not closed"):
            trainer.set_limits(n_epochs=3)
        other.close()
        trainer.set_limits(n_epochs=3)
        assert config.training_parameters == replace(config.training_parameters, n_epochs=3)


def test_steps_that_nobody_planned_are_an_error_of_those_who_ask_for_them() -> None:
    class Endless(small.Sharded):
        def configure_schedulers(self) -> None:
            self.scheduler = CosineAnnealingLR(self.optimizer, self.planned_steps)

    def run(**training: Any) -> int:
        with Endless(small.make_config(**training), batches(4)) as trainer:
            trainer.fit()
            return trainer.planned_steps

    assert run(n_epochs=2) == 8
    with pytest.raises(ConfigError, match="no planned number of steps.*Set max_steps"):
        run(max_time=timedelta(seconds=5))
