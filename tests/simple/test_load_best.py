"""`load_best` loads what `best` is of, wherever the best validation fell, or says that it is another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from dream_trainer.simple import Trainer

ROWS, WIDTH = 80, 4


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def bouncing(model: nn.Module | None = None, val_every: int | None = None, **options: Any) -> Trainer:
    """Ten steps an epoch at a rate at which the loss goes up and down, so that any step may be the best."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()
    if val_every is not None:
        options["training"] = dt.TrainingParameters(val_every_n_steps=val_every, val_every_n_epochs=None)
    return Trainer(
        network() if model is None else model,
        loss="mse",
        optimizer=torch.optim.SGD,
        train=(x, y),
        val=(x[:20], y[:20]),
        batch_size=8,
        progress=False,
        device="cpu",
        **{"name": "run", "lr": 0.9, "epochs": 4} | options,
    )


@pytest.mark.parametrize("val_every", [3, 45])
@pytest.mark.parametrize("averages", [False, True])
def test_the_best_is_saved_wherever_its_validation_falls(
    val_every: int, averages: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ema = [dt.EMA(0.3)] if averages else []
    epochs = 5 if val_every == 45 else 4
    with bouncing(val_every=val_every, epochs=epochs, callbacks=ema) as trainer:
        trainer.fit()
        best = trainer.best
        assert int(trainer.load_best().name.removeprefix("step_")) % val_every == 0
        assert trainer.evaluate()["val/loss"] == pytest.approx(best, rel=1e-12)
        assert len(trainer.dream.checkpoints()) <= 2
    with bouncing(val_every=val_every, epochs=epochs, callbacks=ema) as again:
        again.load_best()
        assert (again.best, again.evaluate()["val/loss"]) == (best, pytest.approx(best, rel=1e-12))
    assert "load_best" not in caplog.text
    assert "config differs" not in caplog.text


def test_another_checkpoint_than_that_of_the_best_is_named_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = dt.CheckpointParameters(best_metric="val/loss")
    with bouncing(val_every=5, checkpoints=checkpoints) as trainer:
        trainer.fit()
        best = trainer.best
        loaded = int(trainer.load_best().name.removeprefix("step_"))
        value = trainer.evaluate()["val/loss"]
    assert best is not None
    assert value > best
    said = f"load_best() takes the weights of step {loaded}, with val/loss {value:.6g}, and the best was {best}"
    assert said in caplog.text
    assert "save_on_best=True" in caplog.text


def test_a_branch_that_keeps_its_counters_is_told_that_the_best_is_not_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bouncing(name="parent", lr=0.1) as parent:
        parent.fit()
    begins = dt.CheckpointParameters(
        best_metric="val/loss",
        keep_best=1,
        save_on_best=True,
        resume=str(parent.dream.run_dir),
        branch=dt.BranchParameters(optimizer="new"),
    )
    with bouncing(name="branch", lr=2.0, epochs=6, checkpoints=begins) as branch:
        branch.fit()
        assert branch.best == parent.best
        assert branch.load_best().is_relative_to(branch.dream.run_dir)
    assert f"the best was {parent.best}: this run has no checkpoint of it" in " ".join(caplog.text.split())


@pytest.mark.parametrize("callbacks", [[], [dt.EMA(0.5)]], ids=["weights", "averages"])
@pytest.mark.parametrize("kind", ["frozen", "adapters", "tied"])
def test_frozen_weights_that_are_not_saved_are_there_already(kind: str, callbacks: list[dt.Callback]) -> None:
    def model() -> nn.Module:
        made: Any = network()
        if kind == "adapters":
            from peft import LoraConfig, get_peft_model

            with torch.random.fork_rng():
                torch.manual_seed(1)
                return get_peft_model(made, LoraConfig(r=2, target_modules=["0"])).double()
        made[0].requires_grad_(False)
        if kind == "tied":
            made.again = made[0]
            made.forward = lambda x: made[2](made[1](made.again(x)))
        return made

    options: dict[str, Any] = {"checkpoints": dt.CheckpointParameters(
        save_frozen=False, keep_last=1, keep_best=1, best_metric="val/loss", save_on_best=True
    )}  # fmt: skip
    with bouncing(model(), val_every=3, callbacks=callbacks, **options) as trainer:
        trainer.fit()
        trainer.load_best()
        assert trainer.evaluate()["val/loss"] == pytest.approx(trainer.best, rel=1e-12)
    with bouncing(model(), val_every=3, callbacks=callbacks, **options) as trainer:
        trainer.load_best()
        assert trainer.evaluate()["val/loss"] == pytest.approx(trainer.best, rel=1e-12)
