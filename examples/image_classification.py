"""Classifies handwritten digits with a small residual network, each digit turned and shifted anew when it is seen.

    python examples/image_classification.py
    torchrun --nproc-per-node=2 examples/image_classification.py

The 1,797 digits of 8 x 8 pixels come with scikit-learn. At the end a picture shows the accuracy as it grew, and the
held-out digits that the network is least sure of.
"""

from __future__ import annotations

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
class ImageConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take about half a minute on one CPU core."""

    width: int = 32
    depth: int = 3
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW; it then falls along a cosine."""


class Turned(TensorDataset):
    """Images [1, 8, 8] from 0 to 1, turned by up to 0.2 radians and shifted at random, and their labels."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, label = super().__getitem__(index)
        # What is drawn here is of seed, epoch and index: the same on any number of ranks, and after a resume.
        angle, (x, y) = (torch.rand(()) * 2 - 1) * 0.2, torch.rand(2) * 0.4 - 0.2
        turn = torch.stack([angle.cos(), -angle.sin(), x, angle.sin(), angle.cos(), y]).view(1, 2, 3)
        grid = F.affine_grid(turn, [1, 1, 8, 8], align_corners=False)
        return F.grid_sample(image[None], grid, align_corners=False)[0], label


class Block(nn.Module):
    """Two convolutions and a way around them. Its norm is over groups of channels, so no sample sees another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)),
            *(nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ImageClassifier(dt.DreamTrainer):
    """Cross entropy over ten classes."""

    config: ImageConfig

    def configure_models(self) -> None:
        width = self.config.width
        self.model = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.Sequential(*[Block(width) for _ in range(self.config.depth)]),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )

    def configure_dataloaders(self) -> tuple[DataLoader, DataLoader]:
        digits: Any = load_digits()
        images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
        train, self.held_out = Turned(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
        sizes = self.config.training_parameters
        return (
            DataLoader(train, sizes.train_batch_size, shuffle=True, drop_last=True),
            DataLoader(self.held_out, sizes.val_batch_size),
        )

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate, weight_decay=0.05)

    def configure_schedulers(self) -> None:
        cosine = dt.ScheduleParameters(name="cosine", warmup_steps=20)
        self.scheduler = dt.build_schedule(cosine, self.optimizer, total_steps=self.total_steps)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).softmax(1)


def picture(trainer: ImageClassifier, probabilities: Tensor) -> Figure:
    """Accuracy over the steps, and the 32 held-out digits with the lowest of the highest probabilities [360, 10]."""
    images, labels = trainer.held_out.tensors
    confidence, guesses = probabilities.max(1)
    figure = Figure(figsize=(11, 4), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1, 1.4))
    left, right = halves
    curve = left.subplots()
    curve.plot(*zip(*trainer.history_of("val/accuracy"), strict=True))
    curve.axhline(0.1, color="grey", linestyle=":", label="guessing")
    curve.set(xlabel="optimizer step", ylabel="accuracy on held-out digits", ylim=(0, 1))
    curve.legend()
    right.suptitle("least sure of: guess and its probability; red where it is wrong")
    for axes, index in zip(right.subplots(4, 8).flat, confidence.argsort().tolist(), strict=False):
        axes.imshow(images[index, 0].numpy(), cmap="gray_r")
        color = "black" if guesses[index] == labels[index] else "red"
        axes.set_title(f"{guesses[index]}  {confidence[index]:.2f}", fontsize=8, color=color)
        axes.axis("off")
    return figure


def main() -> None:
    """Trains from the command line, then draws what came of it."""
    config = ImageConfig(
        project="examples",
        group="image_classification",
        experiment="digits",
        training_parameters=dt.TrainingParameters(
            n_epochs=15, global_batch_size=64, val_every_n_steps=20, val_every_n_epochs=1
        ),
    )
    with ImageClassifier(parse(config)) as trainer:
        trainer.fit()
        probabilities = trainer.predict("val")
        if trainer.world.is_main:
            path = trainer.run_dir / "digits.png"
            picture(trainer, probabilities).savefig(path, dpi=100)
            print(f"held-out accuracy: {trainer.history_of('val/accuracy')[-1][1]:.1%}; picture: {path}")


if __name__ == "__main__":
    main()
