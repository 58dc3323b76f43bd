"""Training on a CUDA device: precisions, steps that wait for nothing, compilation, and a resume."""

from typing import Any, Literal

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from tests.api import DeviceParameters, TrainingParameters
from tests.trainer.arithmetic import fill
from tests.worlds import run_world

pytestmark = pytest.mark.gpu
WIDTH, SIZE, N_BATCHES = 32, 16, 16


def data() -> TensorDataset:
    x = torch.randn(SIZE * N_BATCHES, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True) / WIDTH**0.5)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def network(dropout: float) -> nn.Module:
    return nn.Sequential(Block(dropout), Block(dropout), nn.Linear(WIDTH, 1))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x).float(), y)


class Fits(dt.DreamTrainer):
    """A small regression; keeps its losses on the device, so that nothing waits for it."""

    dropout = 0.0

    def configure_models(self) -> None:
        self.model = network(self.dropout)

    def init_weights(self) -> None:
        fill(self.model)

    def configure_optimizers(self) -> None:
        self.losses: list[Tensor] = []
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DataLoader(data(), SIZE, pin_memory=self.world.device.type == "cuda"), None

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = loss_of(self.model, batch)
        self.backward(loss)
        self.losses.append(loss.detach())
        if self.is_accumulating_gradients:
            return {"loss": loss}
        return {"loss": loss, "norm": self.step(self.model, self.optimizer)}


class Strict(Fits):
    """From the fifth step on, waiting for the device is an error, but from `settle`, which waits before a save, to the
    next step."""

    def pre_train_batch(self, batch: Any, batch_idx: int) -> None:
        if self.world.device.type == "cuda" and self.global_step >= 4:
            torch.cuda.set_sync_debug_mode("error")

    def settle(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        super().settle()

    def post_fit(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def config(
    device: torch.device, *, steps: int, accumulation: int = 1, resume: Literal["auto"] | None = None, **devices: Any
) -> dt.DreamTrainerConfig:
    return dt.DreamTrainerConfig(
        project="tests",
        group="gpu",
        experiment="run",
        device_parameters=DeviceParameters(device=device.type, **devices),
        training_parameters=TrainingParameters(
            max_steps=steps, n_epochs=None, gradient_accumulation_steps=accumulation, gradient_clip_norm=1.0
        ),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",), log_every_n_steps=2),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None, resume=resume),
    )


def losses_by_hand(device: torch.device, steps: int, *, skip: int = 0) -> Tensor:
    """In float32, by a loop as one writes it, which does not make the first `skip` steps."""
    model = network(0.0).to(device)
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for index, (x, y) in enumerate(list(DataLoader(data(), SIZE))[:steps]):
        loss = loss_of(model, (x.to(device), y.to(device)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if index >= skip:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 2e-2), ("bf16", 1e-1), ("fp16", 2e-2)])
def test_losses_are_float32_s_as_near_as_can_be(precision: str, tolerance: float, device: torch.device) -> None:
    with Fits(config(device, steps=8, precision=precision)) as trainer:
        trainer.fit()
        assert trainer.skipped_steps <= (3 if precision == "fp16" else 0)  # until the loss scale fits
        assert next(trainer.model.parameters()).device == device
        expected = losses_by_hand(device, 8, skip=trainer.skipped_steps)
        torch.testing.assert_close(torch.stack(trainer.losses), expected, rtol=tolerance, atol=1e-3)


def four_losses(device: torch.device, compiled: bool) -> list[float]:
    """On a rank; the compiler leaves threads behind."""
    with Fits(config(device, steps=4, compile=compiled)) as trainer:
        trainer.fit()
        return torch.stack(trainer.losses).tolist()


def test_compiled_blocks_train_as_they_do_uncompiled(cuda: torch.device) -> None:
    (found,) = run_world(four_losses, 1, cuda, True)
    torch.testing.assert_close(torch.tensor(found), losses_by_hand(cuda, 4).cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_warm_steps_that_log_and_save_wait_for_nothing(accumulation: int, precision: str, device: torch.device) -> None:
    settings = config(device, steps=10, accumulation=accumulation, precision=precision)
    settings.checkpoint_parameters = dt.CheckpointParameters(save_every_n_steps=3, save_every_n_epochs=None)
    with Strict(settings) as trainer:
        trainer.fit()
        assert trainer.global_step == 10


def test_a_resumed_run_draws_dropout_on_the_device_as_one_that_was_not_stopped(device: torch.device) -> None:
    class Drops(Fits):
        dropout = 0.5

    def train(name: str, *limits: int) -> list[Tensor]:
        losses: list[Tensor] = []
        for limit in limits:
            settings = config(device, steps=limit, resume="auto", precision="bf16")
            settings.experiment = name
            with Drops(settings) as trainer:
                trainer.fit()
                losses += trainer.losses
        return losses

    whole, parts = train("whole", 6), train("parts", 3, 6)
    assert len(whole) == len(parts) == 6
    assert torch.equal(torch.stack(whole), torch.stack(parts))
