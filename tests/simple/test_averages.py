"""With an average of the weights, what is validated is what is predicted with, saved, and loaded as the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer.callbacks import SWA
from dream_trainer.simple import Trainer
from dream_trainer.weights.export import export_checkpoint

ROWS, WIDTH = 40, 5


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, (x.sum(1) + torch.randn(ROWS, generator=generator, dtype=torch.float64))[:, None]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1)).double()


def overfitting(callbacks: list[dt.Callback], **options: Any) -> Trainer:
    """A run whose best validation is neither its first nor its last."""
    given: dict[str, Any] = {"name": "run", "epochs": 12} | options
    return Trainer(
        network(),
        loss="mse",
        optimizer=torch.optim.Adam,
        lr=0.02,
        train=rows(0),
        val=rows(1),
        batch_size=10,
        callbacks=callbacks,
        progress=False,
        device="cpu",
        **given,
    )


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


@pytest.mark.parametrize("later", [[], [dt.EMA(0.9, validate=False)]])
def test_the_best_of_an_average_that_is_gone_is_said_to_be_other_weights(
    later: list[dt.Callback], caplog: pytest.LogCaptureFixture
) -> None:
    with overfitting([dt.EMA(0.9, warm_up=False)]) as trainer:
        trainer.fit()
        trainer.load_best()
    assert "load_best" not in caplog.text
    with overfitting(later) as trainer:
        step = int(trainer.load_best().name.removeprefix("step_"))
    assert f"load_best() takes the weights of step {step}, " in caplog.text
    assert "it validated EMA, which callbacks= lack" in caplog.text
