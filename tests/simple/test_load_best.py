"""`load_best` loads the best validation, and what is validated, such as an average, is predicted with and saved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import SWA, Trainer, export_checkpoint

ROWS, WIDTH = 40, 5


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, (x.sum(1) + torch.randn(ROWS, generator=generator, dtype=torch.float64))[:, None]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1)).double()


def overfitting(
    callbacks: list[dt.Callback], model: nn.Module | None = None, val_every: int | None = None, **options: Any
) -> Trainer:
    """A run whose best validation is neither its first nor its last."""
    if val_every is not None:
        options["training"] = dt.TrainingParameters(val_every_n_steps=val_every, val_every_n_epochs=None)
    given: dict[str, Any] = {"optimizer": torch.optim.Adam, "lr": 0.02, "train": rows(0), "val": rows(1)}
    given |= {"batch_size": 10, "name": "run", "epochs": 12, "progress": False, "device": "cpu"} | options
    return Trainer(network() if model is None else model, loss="mse", callbacks=callbacks, **given)


def loss_of(path: str) -> float:
    model = network()
    dt.load_weights(model, path)
    with torch.no_grad():
        x, y = rows(1)
        return mse_loss(model(x), y).item()


def loss_by_hand(trainer: Trainer) -> float:
    with torch.no_grad():
        x, y = rows(1)
        return mse_loss(trainer.model(x), y).item()


AVERAGES: dict[str, Callable[[], list[dt.Callback]]] = {
    "none": list,
    "validates": lambda: [dt.EMA(0.9)],
    "on the host": lambda: [dt.EMA(0.9, device="cpu", every_n_steps=3)],
    "beside": lambda: [dt.EMA(0.5, validate=False)],
    "two": lambda: [dt.EMA(0.5, validate=False), dt.EMA(0.9)],
    "swa": lambda: [SWA(start=2)],
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_what_is_validated_is_predicted_with_saved_and_loaded_as_the_best(kind: str) -> None:
    with overfitting(AVERAGES[kind]()) as trainer:
        losses = [row["val/loss"] for row in trainer.fit()]
        best = min(losses)
        assert 0 < losses.index(best) < len(losses) - 1, losses
        x, y = rows(1)
        assert trainer.evaluate()["val/loss"] == pytest.approx(losses[-1], rel=1e-12)
        assert mse_loss(trainer.predict(x), y).item() == pytest.approx(losses[-1], rel=1e-12)
        trainer.save("last.safetensors")
        trainer.load_best()
        assert trainer.evaluate()["val/loss"] == pytest.approx(best, rel=1e-12)
        assert mse_loss(trainer.predict(x), y).item() == pytest.approx(best, rel=1e-12)
        assert loss_by_hand(trainer) == pytest.approx(best, rel=1e-12)
        trainer.save("best.pt")
    assert loss_of("last.safetensors") == pytest.approx(losses[-1], rel=1e-12)
    assert loss_of("best.pt") == pytest.approx(best, rel=1e-12)


def test_which_weights_are_saved_can_be_said() -> None:
    with overfitting([dt.EMA(0.5, validate=False), dt.EMA(0.9)]) as trainer:
        losses = [row["val/loss"] for row in trainer.fit()]
        for weights in ("model", "ema", "ema.1"):
            trainer.save(f"{weights}.pt", weights=weights)
        last = trainer.dream.checkpoints()[-1].path
        of_model = loss_by_hand(trainer)
    assert loss_of("model.pt") == pytest.approx(of_model, rel=1e-12)
    assert loss_of("ema.1.pt") == pytest.approx(losses[-1], rel=1e-12)
    export_checkpoint(last, "first", weights="ema")
    assert len({loss_of("model.pt"), loss_of("ema.pt"), loss_of("ema.1.pt")}) == 3
    assert loss_of("ema.pt") == loss_of("first")


def test_training_goes_on_from_the_best_averages() -> None:
    ema = dt.EMA(0.9, warm_up=False)
    with overfitting([ema]) as trainer:
        trainer.fit()
        trainer.load_best()
        before = {name: value.clone() for name, value in ema.averaged("model").items()}
        trainer.fit(steps=trainer.step + 1)
        for name, weight in trainer.model.named_parameters():
            expected = before[name] + 0.1 * (weight.detach() - before[name])
            torch.testing.assert_close(ema.averaged("model")[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("val_every", [3, 45])
@pytest.mark.parametrize("averages", [False, True])
def test_the_best_is_saved_wherever_it_falls(val_every: int, averages: bool, caplog: pytest.LogCaptureFixture) -> None:
    ema = [dt.EMA(0.3)] if averages else []
    with overfitting(ema, val_every=val_every) as trainer:
        trainer.fit()
        best = trainer.best
        assert int(trainer.load_best().name.removeprefix("step_")) % val_every == 0
        assert trainer.evaluate()["val/loss"] == pytest.approx(best, rel=1e-12)
        assert len(trainer.dream.checkpoints()) <= 2
    with overfitting(ema, val_every=val_every) as again:
        again.load_best()
        assert (again.best, again.evaluate()["val/loss"]) == (best, pytest.approx(best, rel=1e-12))
    assert "load_best" not in caplog.text
    assert "config differs" not in caplog.text


def test_another_checkpoint_than_that_of_the_best_is_named_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = dt.CheckpointParameters(best_metric="val/loss")
    with overfitting([], val_every=5, checkpoints=checkpoints) as trainer:
        trainer.fit()
        best = trainer.best
        loaded = int(trainer.load_best().name.removeprefix("step_"))
        value = trainer.evaluate()["val/loss"]
    assert best is not None
    assert value > best
    said = f"load_best() takes the weights of step {loaded}, with val/loss {value:.6g}, and the best was {best}"
    assert said in caplog.text
    assert "save_on_best=True" in caplog.text


def test_a_branch_that_keeps_counters_is_told_that_the_best_is_not_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with overfitting([], name="parent", lr=0.1) as parent:
        parent.fit()
    begins = dt.CheckpointParameters(
        best_metric="val/loss",
        keep_best=1,
        save_on_best=True,
        resume=str(parent.dream.run_dir),
        branch=dt.BranchParameters(optimizer="new"),
    )
    with overfitting([], name="branch", lr=2.0, epochs=14, checkpoints=begins) as branch:
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
    with overfitting(callbacks, model(), val_every=3, **options) as trainer:
        trainer.fit()
        trainer.load_best()
        assert trainer.evaluate()["val/loss"] == pytest.approx(trainer.best, rel=1e-12)
    with overfitting(callbacks, model(), val_every=3, **options) as trainer:
        trainer.load_best()
        assert trainer.evaluate()["val/loss"] == pytest.approx(trainer.best, rel=1e-12)
