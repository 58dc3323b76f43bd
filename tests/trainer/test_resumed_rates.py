"""PyTorch's schedulers where a run goes on, against PyTorch's own loop: the checkpoint's arguments go on."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler as lrs

import dream_trainer as dt
from tests.api import BranchParameters, CheckpointError, ConfigError, Every, read_record
from tests.trainer import saves
from tests.trainer.small import Batch, fit

SHORT, LONG = 6, 20
RATE, OTHER = 0.05, 0.007


def warmup_and_cosine(optimizer: Optimizer, total: int) -> lrs.SequentialLR:
    warm = total // 2
    parts = [lrs.LinearLR(optimizer, 0.01, total_iters=warm), lrs.CosineAnnealingLR(optimizer, total - warm)]
    return lrs.SequentialLR(optimizer, parts, [warm])


def chained_sequence(optimizer: Optimizer, total: int) -> lrs.ChainedScheduler:
    return lrs.ChainedScheduler([warmup_and_cosine(optimizer, total), lrs.StepLR(optimizer, total // 3)], optimizer)


def falling(optimizer: Optimizer, total: int) -> lrs.LambdaLR:
    return lrs.LambdaLR(optimizer, lambda step: 1 - step / (2 * total))


KINDS: dict[str, Callable[[Optimizer, int], lrs.LRScheduler]] = {
    "step": lambda optimizer, total: lrs.StepLR(optimizer, total // 3),
    "cosine": lambda optimizer, total: lrs.CosineAnnealingLR(optimizer, total, 0.001),
    "cyclic": lambda optimizer, total: lrs.CyclicLR(optimizer, RATE, 0.2, total // 3),
    "one cycle": lambda optimizer, total: lrs.OneCycleLR(optimizer, 0.2, total + 1),
    "multiplicative": lambda optimizer, total: lrs.MultiplicativeLR(optimizer, lambda step: 1 - step / (2 * total)),
    "higher cycle": lambda optimizer, total: lrs.OneCycleLR(optimizer, total / 100, 30, div_factor=total),
    "sequence": warmup_and_cosine,
    "chain of a sequence": chained_sequence,
}
NAMED = {
    "step": "step_size: 2 -> 6",
    "cosine": "scheduler (CosineAnnealingLR) is now built with T_max: 6 -> 20, and stays as it was",
    "one cycle": "total_steps: 7 -> 21",
    "sequence": "_milestones: [3] -> [10], _schedulers.0.total_iters: 3 -> 10, _schedulers.1.T_max: 3 -> 10",
}


class Scheduled(saves.Saves):
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
        self.finish()
        return {"loss": loss}

    def finish(self) -> None:
        self.step(self.model, self.optimizer, self.scheduler)


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


def by_hand(
    make: Callable[[Optimizer, int], Any], total: int, steps: int, rate: float = RATE
) -> list[tuple[float, float]]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate, momentum=0.9)
    scheduler, found = make(optimizer, total), []
    for _ in range(steps):
        found.append(used(optimizer))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("kind", NAMED)
def test_checkpoints_arguments_go_on_after_limits_and_branches(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make = KINDS[kind]
    trained = trainer_of(make)
    expected = by_hand(lambda optimizer, _: make(optimizer, SHORT), SHORT, SHORT + 1)  # one cycle ends there
    limits = trained(make_config("limits", SHORT))
    limits.fit()
    limits.set_limits(max_steps=SHORT + 1)
    limits.fit()
    limits.close()
    caplog.clear()
    first = fit(trained(make_config("run", SHORT)))
    branch = {"resume": f"{first.checkpoint_dir}/step_{SHORT:08d}"}
    longer = [
        fit(trainer_of(lambda optimizer, _: make(optimizer, LONG))(config))
        for config in (make_config("run", SHORT + 1), make_config("branch", SHORT + 1, **branch))
    ]
    for used in (limits.used, *(first.used + resumed.used for resumed in longer)):
        assert used == expected
    lines = [line for line in caplog.messages if line.startswith("scheduler (")]
    assert len(lines) == 2
    assert all(NAMED[kind] in line and 'schedule="new"' in line for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_with_its_arguments_a_run_goes_on_bit_for_bit(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make = KINDS[kind]
    trained = trainer_of(make)

    def stop_at_six(trainer: Any) -> None:
        trainer.request_stop("the test says so")

    config = make_config("run", LONG)
    config.callbacks = dt.CallbackCollection([Every(SHORT, "steps", stop_at_six)])
    first = fit(trained(config))
    assert first.global_step == SHORT
    assert first.used + fit(trained(make_config("run", LONG))).used == by_hand(make, LONG, LONG)
    assert not [line for line in caplog.messages if line.startswith("scheduler")]


def test_another_learning_rate_is_no_argument_and_the_checkpoint_s_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    make = KINDS["cosine"]
    trained = trainer_of(lambda optimizer, _: make(optimizer, SHORT))
    fit(trained(make_config("run", SHORT)))
    same = fit(trained(make_config("run", SHORT + 1, rate=0.7)))
    assert same.used == by_hand(make, SHORT, SHORT + 1)[SHORT:]
    assert "this config has lr=0.7, and the checkpoint's 0.05 stays in use" in caplog.text
    assert "is now built" not in caplog.text


def test_another_kind_of_schedule_has_no_place_and_is_refused_by_name() -> None:
    fit(trainer_of(KINDS["step"])(make_config("run", SHORT)))
    with pytest.raises(CheckpointError, match=r'scheduler is of class \w+, and .* StepLR.*schedule="new"'):
        fit(trainer_of(KINDS["cosine"])(make_config("run", LONG)))


def parent(make: Callable[[Optimizer, int], Any]) -> str:
    return f"{fit(trainer_of(make)(make_config('parent', SHORT))).checkpoint_dir}/step_{SHORT:08d}"


def branch(path: str, make: Callable[[Optimizer, int], Any], rate: float, **words: Any) -> list[tuple[float, float]]:
    return fit(trainer_of(make)(make_config("branch", LONG, rate, resume=path, branch=BranchParameters(**words)))).used


@pytest.mark.parametrize(("make", "optimizer"), zip([*KINDS.values(), falling], cycle("keep new keep moments".split())))
def test_a_new_schedule_begins_at_its_first_step(make: Any, optimizer: str) -> None:
    found = branch(parent(make), make, OTHER, schedule="new", optimizer=optimizer)
    assert found == by_hand(make, LONG, LONG - SHORT, RATE if optimizer == "keep" else OTHER)


@pytest.mark.parametrize("make", [falling, KINDS["cosine"]])
def test_a_schedule_that_is_built_once_begins_at_the_checkpoints_rate_or_is_refused(make: Any) -> None:
    once: Any = type("Once", (trainer_of(make),), {"configure_schedulers": cache(Scheduled.configure_schedulers)})
    config = make_config("branch", LONG, OTHER, resume=parent(make), branch=BranchParameters(schedule="new"))
    with nullcontext() if make is falling else pytest.raises(CheckpointError, match="LR. was built for the optimizer"):
        assert fit(once(config)).used == by_hand(make, LONG, LONG - SHORT)


def test_what_a_cycle_altered_returns_to_what_the_optimizer_was_configured_with() -> None:
    cosine = KINDS["cosine"]
    assert branch(parent(KINDS["one cycle"]), cosine, RATE, schedule="new") == by_hand(cosine, LONG, LONG - SHORT)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"schedule": "extend"}, "a CosineAnnealingLR, whose rates follow from those before"),
        ({"optimizer": "moments"}, 'branch with optimizer="moments"'),
        ({"optimizer": "new"}, 'branch with optimizer="new"'),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name_and_leaves_no_failed_run(words: dict[str, Any], told: str) -> None:
    path = parent(KINDS["cosine"])
    with pytest.raises(ConfigError, match=told):
        branch(path, KINDS["cosine"], OTHER, **words)
    assert read_record(Path(path).parent.parent.with_name("branch")) is None


class Plateau(Scheduled):
    """Validates after each step, with a loss that never falls."""

    patience = 2

    def configure_schedulers(self) -> None:
        self.scheduler = lrs.ReduceLROnPlateau(self.optimizer, patience=self.patience, factor=0.5)

    def finish(self) -> None:
        self.step(self.model, self.optimizer)
        self.scheduler.step(1.0)


def test_a_plateau_keeps_what_it_has_waited(caplog: pytest.LogCaptureFixture) -> None:
    straight = fit(Plateau(make_config("straight", 15)))
    first = fit(Plateau(make_config("run", 5)))
    assert first.used + fit(Plateau(make_config("run", 15))).used == straight.used
    assert straight.used[0] != straight.used[-1]
    assert "is now built" not in caplog.text


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
    assert resumed.used == by_hand(lambda optimizer, _: warmup_and_cosine(optimizer, SHORT), LONG, LONG)[SHORT:]
