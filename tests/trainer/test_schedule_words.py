"""Branches whose schedules are PyTorch's: each word against PyTorch's own loop, and what a cycle altered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs

from dream_trainer.config.branch_parameters import BranchParameters
from dream_trainer.errors import ConfigError
from dream_trainer.trainer.run_record import read_record
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
)

OTHER = 0.007


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parent(kind: str) -> str:
    trainer = fit(trainer_of(KINDS[kind])(make_config("parent", SHORT)))
    return f"{trainer.checkpoint_dir}/step_{SHORT:08d}"


def branch(name: str, path: str, kind: str, steps: int = LONG, **words: Any) -> list[tuple[float, float]]:
    config = make_config(name, steps, OTHER, resume=path, branch=BranchParameters(**words))
    return fit(trainer_of(KINDS[kind])(config)).used


@pytest.mark.parametrize("kind", ["cosine", "one cycle", "higher base", "multiplicative", "chain of a sequence"])
def test_each_word_is_the_loop_by_hand_for_schedules_that_compute_a_rate_from_the_last(kind: str) -> None:
    path, make = parent(kind), KINDS[kind]
    straight = by_hand(make, LONG, LONG, OTHER)
    assert branch("moments", path, kind, optimizer="moments") == straight[SHORT:]
    assert branch("optimizer", path, kind, optimizer="new") == straight[SHORT:]
    assert branch("schedule", path, kind, schedule="new") == by_hand(make, LONG, LONG - SHORT)
    both: dict[str, Any] = {"schedule": "new", "optimizer": "moments"}
    assert branch("both", path, kind, **both) == straight[: LONG - SHORT]


@pytest.mark.parametrize("cycle", ["one cycle", "cyclic"])
@pytest.mark.parametrize("word", ["new", "keep"])
def test_what_a_cycle_altered_returns_to_what_the_optimizer_was_configured_with(
    cycle: str, word: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = by_hand(KINDS["cosine"], LONG, LONG)[SHORT if word == "keep" else 0 :][: LONG - SHORT]
    assert branch("branch", parent(cycle), "cosine", schedule=word) == expected
    said = [line for line in caplog.messages if line.startswith("optimizer: ")]
    assert [line.partition(" goes on")[0] for line in said] == [
        f"optimizer: this config has lr={OTHER}, and the checkpoint's {RATE}"
    ]


class Adam(Scheduled):
    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE, betas=(0.7, 0.99))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.used.append((self.optimizer.param_groups[0]["lr"], self.optimizer.param_groups[0]["betas"][0]))
        loss = self.model(batch[0]).square().mean()
        self.backward(loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}


def test_betas_that_a_cycle_altered_return_too_and_its_groups_forget_it() -> None:
    one = type("One", (Adam,), {"make": staticmethod(KINDS["one cycle"])})
    path = fit(one(make_config("parent", SHORT))).checkpoint_dir / f"step_{SHORT:08d}"
    cosine = type("Cosine", (Adam,), {"make": staticmethod(KINDS["cosine"])})
    words = BranchParameters(schedule="new")
    child = fit(cosine(make_config("child", LONG, resume=str(path), branch=words)))
    rates = [rate for rate, _ in by_hand(KINDS["cosine"], LONG, LONG - SHORT)]
    assert child.used == [(rate, 0.7) for rate in rates]
    assert "max_lr" not in child.optimizer.param_groups[0]


def several(optimizer: Optimizer, total: int) -> list[Any]:
    return [lrs.ExponentialLR(optimizer, 0.9), lrs.ExponentialLR(optimizer, 0.8)]


@pytest.mark.parametrize(
    ("make", "words", "said"),
    [
        (KINDS["cosine"], {"schedule": "extend"}, "a CosineAnnealingLR, whose form is not known"),
        (several, {"optimizer": "moments"}, "several schedules drive one optimizer"),
        (None, {"optimizer": "moments"}, "a ReduceLROnPlateau, which has come to its rate by a metric"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name_and_leaves_no_failed_run(make: Any, words: Any, said: str) -> None:
    kind = Plateau if make is None else trainer_of(make)
    trainer = fit(kind(make_config("parent", 3)))
    path = f"{trainer.checkpoint_dir}/step_{3:08d}"
    with pytest.raises(ConfigError, match=said):
        fit(kind(make_config("child", 6, OTHER, resume=path, branch=BranchParameters(**words))))
    refused = trainer.run_dir.with_name("child")
    assert read_record(refused) is None
    assert not (refused / "config.json").exists()


def falling(optimizer: Optimizer, total: int) -> lrs.LambdaLR:
    return lrs.LambdaLR(optimizer, lambda step: 1 - step / (2 * total))


class Grouped(Scheduled):
    """Its parameters in one group each, or all in one."""

    n_groups = 2
    make = staticmethod(falling)

    def configure_optimizers(self) -> None:
        parameters = list(self.model.parameters())
        groups = [parameters] if self.n_groups == 1 else [parameters[:1], parameters[1:]]
        options = {"lr": self.config.learning_rate, "momentum": 0.9}
        self.optimizer = torch.optim.SGD([{"params": group} for group in groups], **options)


class One(Grouped):
    n_groups = 1


@pytest.mark.parametrize(("before", "after"), [(Grouped, One), (One, Grouped)])
def test_a_new_optimizer_with_other_groups_takes_the_place_of_the_schedule(
    before: type[Grouped], after: type[Grouped]
) -> None:
    first = fit(before(make_config("parent", SHORT)))
    path = f"{first.checkpoint_dir}/step_{SHORT:08d}"
    straight = by_hand(falling, LONG, LONG, OTHER)[SHORT:]
    for word in ("keep", "extend"):
        words = BranchParameters(optimizer="new", schedule=word)
        child = fit(after(make_config(word, LONG, OTHER, resume=path, branch=words)))
        # Extended, it does not climb above the half that the parent has come to.
        expected = [rate if word == "keep" else min(rate, OTHER / 2) for rate, _ in straight]
        assert [rate for rate, _ in child.used] == pytest.approx(expected, rel=1e-12)
        assert len(child.optimizer.param_groups) == after.n_groups


def test_what_is_said_of_another_schedule_has_the_rate_that_was(caplog: pytest.LogCaptureFixture) -> None:
    path = parent("one cycle")
    was = by_hand(KINDS["one cycle"], SHORT, SHORT + 1)[-1][0]
    branch("cosine", path, "cosine", optimizer="moments")
    (line,) = [line for line in caplog.messages if "is now CosineAnnealingLR instead of OneCycleLR" in line]
    assert line.endswith(f"and was {was:.4g}.")
    caplog.clear()
    fit(trainer_of(falling)(make_config("falling", LONG, resume=path)))
    assert not [line for line in caplog.messages if "has another form" in line]
