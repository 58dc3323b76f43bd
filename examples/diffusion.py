"""Draws the digit that is asked for, by diffusion; from the weights, and from their averages (EMA).

    python examples/diffusion.py
    torchrun --nproc-per-node=2 examples/diffusion.py

A noised digit is cos(a) * digit + sin(a) * noise, and the network learns the direction from one to the other
(v-prediction, Salimans and Ho 2022). The digits of 8 x 8 pixels come with scikit-learn. At the end a picture shows the
validation loss, and eight draws of each digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from dream_trainer import parse


@dataclass(kw_only=True)
class DiffusionConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take less than a minute on one CPU core."""

    width: int = 256
    depth: int = 4
    learning_rate: float = 1e-3
    """Of AdamW, without a schedule: the averages make up for it."""


class Noised(TensorDataset):
    """A digit [64] and its label, its noise [64], and the angle between digit and noise [1], up to pi / 2."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        # What is drawn here is of seed, epoch and index: the same on any number of ranks, and after a resume.
        return *super().__getitem__(index), torch.randn(64), torch.rand(1) * math.pi / 2


class Block(nn.Module):
    """A residual block that is told label and angle by the condition [batch, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.condition = nn.LayerNorm(width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + self.layers(self.norm(x) + self.condition(condition))


class Network(nn.Module):
    """The direction cos(a) * noise - sin(a) * digit, [batch, 64], of a noised digit, its label and its angle."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.label, self.angle = nn.Embedding(10, width), nn.Linear(16, width)
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, noised: Tensor, label: Tensor, angle: Tensor) -> Tensor:
        waves = angle * torch.arange(1, 9, device=angle.device)
        condition = F.silu(self.label(label) + self.angle(torch.cat([waves.sin(), waves.cos()], dim=1)))
        x = self.first(noised)
        for block in self.blocks:
            x = block(x, condition)
        return self.last(x)


class Diffusion(dt.DreamTrainer):
    """A mean squared error, and a way to draw."""

    config: DiffusionConfig

    def configure_models(self) -> None:
        self.model = Network(self.config.width, self.config.depth)

    def configure_dataloaders(self) -> tuple[DataLoader, DataLoader]:
        digits: Any = load_digits()
        images, labels = torch.tensor(digits.data / 8 - 1, dtype=torch.float32), torch.tensor(digits.target)
        sizes = self.config.training_parameters
        return (
            DataLoader(Noised(images[:1437], labels[:1437]), sizes.train_batch_size, shuffle=True, drop_last=True),
            DataLoader(Noised(images[1437:], labels[1437:]), sizes.val_batch_size),
        )

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)

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
        """Images [count, 64] of these digits, turned from pure noise in equal steps of the angle (DDIM).

        Every rank calls it, since the model may be sharded.
        """
        self.model.eval()
        labels, step = labels.to(self.world.device), math.pi / 2 / steps
        x = torch.randn(len(labels), 64, generator=torch.Generator().manual_seed(0)).to(self.world.device)
        for number in range(steps, 0, -1):
            direction = self.model(x, labels, torch.full((len(labels), 1), number * step, device=x.device))
            x = math.cos(step) * x - math.sin(step) * direction
        return x.cpu()


def picture(trainer: Diffusion, draws: dict[str, Tensor]) -> Figure:
    """The validation loss, and draws by name, each [80, 64]: eight of 0, eight of 1, and so on."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    curve, *grids = figure.subplots(1, 1 + len(draws), width_ratios=(1.4, *(1 for _ in draws)))
    curve.plot(*zip(*trainer.history_of("val/loss"), strict=True))
    curve.set(xlabel="optimizer step", ylabel="validation loss of the averages")
    for axes, (name, images) in zip(grids, draws.items(), strict=True):
        tiles = F.pad(images.view(10, 8, 8, 8), (1, 1, 1, 1), value=-1).transpose(1, 2)
        axes.imshow(tiles.reshape(100, 80).numpy(), cmap="gray_r", vmin=-1, vmax=1)
        axes.set(title=f"drawn by the {name}", xticks=[], yticks=[])
    return figure


def main() -> None:
    """Trains from the command line, then shows what came of it."""
    config = DiffusionConfig(
        project="examples",
        group="diffusion",
        experiment="digits",
        training_parameters=dt.TrainingParameters(
            n_epochs=60, global_batch_size=64, val_every_n_steps=50, val_every_n_epochs=1
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=20),
        logger_parameters=dt.LoggerParameters(log_every_n_steps=50),
        callbacks=[dt.EMA(0.995)],
    )
    with Diffusion(parse(config)) as trainer:
        trainer.fit()
        labels = torch.arange(80) // 8
        draws = {"weights": trainer.draw(labels)}
        with trainer.get_callback(dt.EMA).averaged_weights():
            draws["averages"] = trainer.draw(labels)
        if trainer.world.is_main:
            path = trainer.run_dir / "digits.png"
            picture(trainer, draws).savefig(path, dpi=90, bbox_inches="tight")
            print(f"validation loss: {trainer.history_of('val/loss')[-1][1]:.3f}; picture: {path}")


if __name__ == "__main__":
    main()
