"""Classifies handwritten digits with a small residual network, each digit turned and shifted anew when it is seen.

    python examples/image_classification.py
    torchrun --nproc-per-node=2 examples/image_classification.py

The 1,797 digits come with scikit-learn. At the end a picture shows the accuracy, and the held-out digits that the
network is least sure of. Loss and accuracy are those of the recipe, dream_trainer/recipes/classifier.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from digits import TRAINING, digits
from pictures import curves, tiles
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dream_trainer as dt


@dataclass(kw_only=True)
class ImageConfig(dt.recipes.ClassifierConfig):
    """A run of this example; the defaults take about half a minute on one CPU core."""

    width: int = 32
    depth: int = 3


def turned(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """An image [1, 8, 8] from 0 to 1, turned by up to 0.2 radians and shifted at random, and its label."""
    image, label = sample
    # What is drawn here is of seed, epoch and index: the same on any number of ranks, and after a resume.
    angle, (x, y) = (torch.rand(()) * 2 - 1) * 0.2, torch.rand(2) * 0.4 - 0.2
    turn = torch.stack([angle.cos(), -angle.sin(), x, angle.sin(), angle.cos(), y]).view(1, 2, 3)
    grid = F.affine_grid(turn, [1, 1, 8, 8], align_corners=False)
    return F.grid_sample(image[None], grid, align_corners=False)[0], label


class Block(nn.Module):
    """Two convolutions and a way around them. Its norm is over groups of channels, so no sample sees another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        halves = [(nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
        self.layers = nn.Sequential(*halves[0], *halves[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ImageClassifier(dt.recipes.Classifier):
    """Ten classes."""

    config: ImageConfig

    def configure_models(self) -> None:
        width = self.config.width
        parts = [nn.Conv2d(1, width, 3, padding=1), nn.Sequential(*[Block(width) for _ in range(self.config.depth)])]
        self.model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))

    def datasets(self) -> tuple[Any, Any]:
        images, labels = digits()
        self.held_out = images[TRAINING:]
        train, val = (
            TensorDataset(images[:TRAINING], labels[:TRAINING]),
            TensorDataset(self.held_out, labels[TRAINING:]),
        )
        return dt.data.TransformedDataset(train, [dt.data.Map(turned)]), val


def main() -> None:
    """Trains from the command line, then draws what came of it."""
    config = ImageConfig(
        project="examples",
        group="image_classification",
        experiment="digits",
        optimizer=dt.OptimizerParameters(lr=3e-3, weight_decay=0.05),
        schedule=dt.ScheduleParameters(name="cosine", warmup_steps=20),
        training_parameters=dt.TrainingParameters(n_epochs=15, global_batch_size=64, val_every_n_steps=20),
    )
    with ImageClassifier.from_cli(config) as trainer:
        trainer.fit()
        confidence, guesses = trainer.predict("val").max(1)
        if trainer.world.is_main:
            accuracy, path = trainer.history_of("val/accuracy"), trainer.run_dir / "digits.png"
            figure, (right,) = curves({"accuracy": accuracy}, "on held-out digits", guess=0.1, beside=[1.4])
            unsure = confidence.argsort()[:32]
            captions = [f"{guesses[index]}  {confidence[index]:.2f}" for index in unsure]
            tiles(right, trainer.held_out[unsure], 8, "least sure of: guess and its probability", captions)
            figure.savefig(path, dpi=100)
            print(f"held-out accuracy: {accuracy[-1][1]:.1%}; picture: {path}")


if __name__ == "__main__":
    main()
