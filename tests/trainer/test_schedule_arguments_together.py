"""Changed arguments of PyTorch's schedulers beside other things: two optimizers, branches of branches, two ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

import dream_trainer as dt
from dream_trainer.config.branch_parameters import BranchParameters
from tests.trainer.small import Batch
from tests.trainer.test_schedule_arguments import (
    KINDS,
    LONG,
    RATE,
    SHORT,
    Plateau,
    Scheduled,
    by_hand,
    fit,
    make_config,
    trainer_of,
    warmup_and_cosine,
)
from tests.worlds import run_world

Rates = list[tuple[float, float]]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TwoOptimizers(Scheduled):
    """Warm-up and cosine for one, a rising line for the other; notes both rates."""

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model[0].parameters(), lr=RATE)
        self.second = torch.optim.SGD(self.model[1].parameters(), lr=0.5)

    def configure_schedulers(self) -> None:
        assert self.total_steps is not None
        self.warm = warmup_and_cosine(self.optimizer, self.total_steps)
        self.line = lrs.LinearLR(self.second, 0.1, total_iters=self.total_steps)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.used.append((self.optimizer.param_groups[0]["lr"], self.second.param_groups[0]["lr"]))
        loss = self.model(batch[0]).square().mean()
        self.backward(loss)
        self.step(self.model, self.optimizer, self.warm)
        self.step(self.model, self.second, self.line)
        return {"loss": loss}


def both_by_hand(total: int) -> Rates:
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate) for rate in (RATE, 0.5))
    schedulers = warmup_and_cosine(first, total), lrs.LinearLR(second, 0.1, total_iters=total)
    found = []
    for _ in range(total):
        found.append((first.param_groups[0]["lr"], second.param_groups[0]["lr"]))
        for optimizer, scheduler in zip((first, second), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    return found


def train_both(directory: str) -> dict[str, Rates]:
    os.chdir(directory)
    limits = TwoOptimizers(make_config("limits", SHORT))
    limits.fit()
    limits.set_limits(max_steps=LONG)
    limits.fit()
    limits.close()
    first = fit(TwoOptimizers(make_config("run", SHORT)))
    branch = fit(TwoOptimizers(make_config("branch", 12, resume=str(first.run_dir))))
    of_it = fit(TwoOptimizers(make_config("branch of it", LONG, resume=str(branch.run_dir))))
    return {"limits": limits.used, "branches": first.used + branch.used + of_it.used}


def check_both(found: dict[str, Rates]) -> None:
    short, middle, long = (both_by_hand(total) for total in (SHORT, 12, LONG))
    assert found["limits"] == short + long[SHORT:]
    assert found["branches"] == short + middle[SHORT:] + long[12:]


def test_each_of_two_optimizers_follows_its_own_also_in_a_branch_of_a_branch(tmp_path: Path) -> None:
    check_both(train_both(str(tmp_path)))


def test_the_same_on_two_sharded_ranks(tmp_path: Path) -> None:
    for found in run_world(train_both, 2, str(tmp_path)):
        check_both(found)


class Reduced(Plateau):
    """A plateau with a floor that follows the rate, of a metric that never falls."""

    def configure_schedulers(self) -> None:
        plateau = dt.ScheduleParameters(name="plateau", patience=1, factor=0.5, min_lr_ratio=0.2)
        self.scheduler = dt.build_schedule(plateau, self.optimizer, total_steps=self.total_steps)


def test_a_plateau_outlives_new_limits_and_begins_anew_at_the_base_rate(caplog: pytest.LogCaptureFixture) -> None:
    straight = fit(Reduced(make_config("straight", 15)))
    limits = Reduced(make_config("limits", 5))
    limits.fit()
    limits.set_limits(max_steps=15)
    limits.fit()
    limits.close()
    assert limits.used == straight.used
    assert "is now built" not in caplog.text
    anew = BranchParameters(schedule="new", counters="new", data="new")
    branch = fit(Reduced(make_config("branch", 3, resume=str(straight.run_dir), branch=anew)))
    assert branch.used == straight.used[:3]


def test_a_kept_schedule_goes_on_at_its_step_where_counters_begin_anew() -> None:
    trained = trainer_of(KINDS["cosine"])
    first = fit(trained(make_config("run", SHORT)))
    words = BranchParameters(counters="new", data="new")
    branch = fit(trained(make_config("branch", LONG, resume=str(first.run_dir), branch=words)))
    assert branch.used == by_hand(KINDS["cosine"], LONG, SHORT + LONG)[SHORT:]


def test_a_checkpoint_that_is_loaded_into_a_run_that_has_trained_already_gives_its_place() -> None:
    trained = trainer_of(KINDS["sequence"])
    first = fit(trained(make_config("run", SHORT)))
    with trained(make_config("other", LONG)) as trainer:
        trainer.fit()
        trainer.load_checkpoint(first.checkpoint_dir / f"step_{SHORT:08d}")
        trainer.fit()
    assert trainer.used[LONG:] == by_hand(KINDS["sequence"], LONG, LONG)[SHORT:]
