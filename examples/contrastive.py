"""Learns what digits look like without being told which is which (SimCLR, Chen et al. 2020).

    python examples/contrastive.py
    torchrun --nproc-per-node=2 examples/contrastive.py

Two views of a digit shall lie close together and far from all others of the batch, those of the other ranks too, which
are gathered with their gradients. The digits of 8 x 8 pixels come with scikit-learn. At the end a picture shows how
often the nearest of 50 digits with a label has the right one, by the learned features and by the pixels.
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

TRAINING = 1437  # digits to learn from; the other 360 are held out
LABELLED = 50  # of them, for the validation alone


@dataclass(kw_only=True)
class ContrastiveConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take less than a minute on one CPU core."""

    width: int = 32
    learning_rate: float = 2e-3
    temperature: float = 0.2
    """Cosines are divided by it; the lower, the more the nearest of the others count."""


class Views(TensorDataset):
    """Two views [1, 8, 8] of a digit: turned, shifted, sheared and grown at random."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        # What is drawn here is of seed, epoch and index: the same on any number of ranks, and after a resume.
        turns = torch.eye(2, 3) + (torch.rand(2, 2, 3) - 0.5) * 0.7
        grid = F.affine_grid(turns, [2, 1, 8, 8], align_corners=False)
        (image,) = super().__getitem__(index)
        return F.grid_sample(image.expand(2, 1, 8, 8), grid, align_corners=False).unbind()


class SimCLR(dt.DreamTrainer):
    """Of all views in the batch, on all ranks, which one is of the same digit?"""

    config: ContrastiveConfig

    def configure_models(self) -> None:
        width = self.config.width
        features = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, width, 3, 1, 1), nn.GroupNorm(8, width), nn.ReLU()),
            nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(8, 2 * width), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(32 * width, 64)),
        )
        self.model = nn.Sequential(
            features, nn.Sequential(nn.ReLU(), nn.Linear(64, 32))
        )  # the second for the loss alone

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)

    def configure_dataloaders(self) -> tuple[DataLoader, DataLoader]:
        digits: Any = load_digits()
        sizes = self.config.training_parameters
        self.images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
        self.labels = torch.tensor(digits.target)
        # A loss between the samples of a batch cannot be accumulated: the ranks' batches are the global batch.
        batch_size = (sizes.global_batch_size or 256) // self.world.dp_size
        train, held_out = self.images[:TRAINING], TensorDataset(self.images[TRAINING:], self.labels[TRAINING:])
        return (
            DataLoader(Views(train), batch_size, shuffle=True, drop_last=True),
            DataLoader(held_out, sizes.val_batch_size),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        own = F.normalize(self.model(torch.cat(batch)))  # [2 n, 32]: first views, then second ones
        every = self.world.all_gather_with_gradient(own)
        views = torch.arange(len(own), device=own.device)
        places = self.world.dp_rank * len(own) + views  # of this rank's views among all
        cosines = own @ every.T / self.config.temperature
        cosines[views, places] = -torch.inf  # a view is not compared with itself
        loss = F.cross_entropy(cosines, places.roll(len(own) // 2))
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The nearest of the digits with a label, for each of a batch."""
        known, found = (self.model[0](images) for images in (self.images[:LABELLED].to(batch[0]), batch[0]))
        return (F.normalize(found) @ F.normalize(known).T).argmax(1)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        guesses = self.labels.to(batch[1].device)[self.predict_step(batch, batch_idx)]
        return {"accuracy": (guesses == batch[1]).float().mean()}


def picture(trainer: SimCLR, by_features: Tensor) -> Figure:
    """Accuracy over the steps, and digits whose nearest labelled one is wrong by their pixels."""
    images, labels = trainer.images[TRAINING:], trainer.labels[TRAINING:]
    by_pixels = torch.cdist(images.flatten(1), trainer.images[:LABELLED].flatten(1)).argmin(1)
    is_right = trainer.labels[by_pixels] == labels
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1, 1.6))
    left, right = halves
    curve = left.subplots()
    curve.plot(*zip(*trainer.history_of("val/accuracy"), strict=True), label="features")
    curve.axhline(float(is_right.float().mean()), color="grey", linestyle=":", label="pixels")
    curve.set(xlabel="optimizer step", ylabel=f"nearest of {LABELLED} has the label")
    curve.legend()
    right.suptitle("held out; nearest labelled digit by pixels; by features")
    wrong = (~is_right).nonzero().flatten().tolist()
    for column, index in zip(right.subplots(3, 10).T, wrong, strict=False):
        shown = (images[index], trainer.images[by_pixels[index]], trainer.images[by_features[index]])
        for axes, image in zip(column, shown, strict=True):
            axes.imshow(image[0].numpy(), cmap="gray_r")
            axes.set(xticks=[], yticks=[])
    return figure


def main() -> None:
    """Trains from the command line, then shows what came of it."""
    config = ContrastiveConfig(
        project="examples",
        group="contrastive",
        experiment="digits",
        training_parameters=dt.TrainingParameters(
            n_epochs=40, global_batch_size=256, val_every_n_steps=20, val_every_n_epochs=1
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=10),
    )
    with SimCLR(parse(config)) as trainer:
        trainer.fit()
        by_features = trainer.predict("val")
        if trainer.world.is_main:
            path = trainer.run_dir / "digits.png"
            picture(trainer, by_features).savefig(path, dpi=90, bbox_inches="tight")
            accuracy = trainer.history_of("val/accuracy")[-1][1]
            print(f"right for {accuracy:.1%} of the digits held out, with {LABELLED} labels; picture: {path}")


if __name__ == "__main__":
    main()
