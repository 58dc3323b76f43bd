"""Draws the digit that is asked for, by diffusion; from the weights, and from their averages (EMA).

python examples/diffusion.py
torchrun --nproc-per-node=2 examples/diffusion.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from denoiser import Denoiser
from digits import TRAINING, digits
from pictures import report
from torch import Tensor
from torch.utils.data import DataLoader

import dream_trainer as dt


@dataclass(kw_only=True)
class DiffusionConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take less than a minute on one CPU core."""

    width: int = 256
    depth: int = 4


def noised(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """A digit [64] and its label, its noise [64], and the angle a [1] between them: cos(a) * digit + sin(a) * noise."""
    # What is drawn here is of seed, epoch and index: the same on any number of ranks, and after a resume.
    return *sample, torch.randn(64), torch.rand(1) * math.pi / 2


class Diffusion(dt.DreamTrainer):
    """Learns the direction from a noised digit to its noise (v-prediction, Salimans and Ho 2022), and draws by it."""

    config: DiffusionConfig

    def configure_models(self) -> None:
        self.model = Denoiser(self.config.width, self.config.depth)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        (images, labels), sizes = digits(), self.config.training_parameters
        samples = [*zip(images.flatten(1) * 2 - 1, labels, strict=True)]
        parts = samples[:TRAINING], samples[TRAINING:]
        train, val = (dt.data.TransformedDataset(part, [dt.data.Map(noised)]) for part in parts)
        train_loader = DataLoader(train, self.micro_batch_size, shuffle=True, drop_last=True)
        return train_loader, DataLoader(val, sizes.val_batch_size)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)  # no schedule: the averages make up for it

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        image, label, noise, angle = batch
        found = self.model(angle.cos() * image + angle.sin() * noise, label, angle)
        return F.mse_loss(found, angle.cos() * noise - angle.sin() * image)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self.loss(batch)}

    @torch.no_grad()
    def draw(self, labels: Tensor, steps: int = 40) -> Tensor:
        """Images [count, 64] of these digits, turned from noise in equal steps of the angle (DDIM); on every rank."""
        self.model.eval()
        labels, step = labels.to(self.world.device), math.pi / 2 / steps
        x = torch.randn(len(labels), 64, generator=torch.Generator().manual_seed(0)).to(self.world.device)
        for number in range(steps, 0, -1):
            direction = self.model(x, labels, torch.full((len(labels), 1), number * step, device=x.device))
            x = math.cos(step) * x - math.sin(step) * direction
        return x.cpu()


if __name__ == "__main__":
    sizes = dt.TrainingParameters(n_epochs=60, global_batch_size=64, val_every_n_steps=50, val_every_n_epochs=1)
    config = DiffusionConfig(
        project="examples",
        group="diffusion",
        experiment="digits",
        training_parameters=sizes,
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=20),
        callbacks=[dt.EMA(0.995)],
    )
    with Diffusion.from_cli(config) as trainer:
        trainer.fit()
        labels = torch.arange(80) // 8
        grids = {"drawn by the weights": trainer.draw(labels)}
        with trainer.get_callback(dt.EMA).averaged_weights():
            grids["drawn by the averages"] = trainer.draw(labels)
        report(trainer, "val/loss", grids, columns=8)
