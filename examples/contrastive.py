"""Learns what digits look like without being told which is which (SimCLR, Chen et al. 2020).

    python examples/contrastive.py
    torchrun --nproc-per-node=2 examples/contrastive.py

Two views of a digit shall lie close together and far from all others of the batch, those of the other ranks too, which
are gathered with their gradients. Accuracy is how often the nearest of 50 digits with a label has the right one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from digits import TRAINING, digits
from pictures import report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt

LABELLED = 50  # digits to learn from whose labels validation knows


@dataclass(kw_only=True)
class ContrastiveConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take less than a minute on one CPU core."""

    width: int = 32
    temperature: float = 0.2
    """Cosines are divided by it; the lower, the more the nearest of the others count."""


def views(image: Tensor) -> tuple[Tensor, ...]:
    """Two views [1, 8, 8] of a digit: turned, shifted, sheared and grown at random, by seed, epoch and index."""
    turns = torch.eye(2, 3) + (torch.rand(2, 2, 3) - 0.5) * 0.7
    grid = F.affine_grid(turns, [2, 1, 8, 8], align_corners=False)
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
        self.model = nn.Sequential(features, nn.Sequential(nn.ReLU(), nn.Linear(64, 32)))  # the second for the loss

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def configure_dataloaders(self) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
        (self.images, self.labels), sizes = digits(), self.config.training_parameters
        # A loss between the samples of a batch cannot be accumulated: the ranks' batches are the global batch.
        batch_size = (sizes.global_batch_size or 256) // self.world.dp_size
        pairs = dt.data.TransformedDataset(self.images[:TRAINING], [dt.data.Map(views)])
        held_out = TensorDataset(self.images[TRAINING:], self.labels[TRAINING:])
        train_loader = DataLoader(pairs, batch_size, shuffle=True, drop_last=True)
        return train_loader, DataLoader(held_out, sizes.val_batch_size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        own = F.normalize(self.model(torch.cat(batch)))  # [2 n, 32]: first views, then second ones
        every = self.world.all_gather_with_gradient(own)
        rows = torch.arange(len(own), device=own.device)
        places = self.world.dp_rank * len(own) + rows  # of this rank's views among all
        cosines = own @ every.T / self.config.temperature
        cosines[rows, places] = -torch.inf  # a view is not compared with itself
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


if __name__ == "__main__":
    sizes = dt.TrainingParameters(n_epochs=40, global_batch_size=256, val_every_n_steps=20, val_every_n_epochs=1)
    config = ContrastiveConfig(project="examples", group="contrastive", experiment="digits", training_parameters=sizes)
    with SimCLR.from_cli(config) as trainer:
        trainer.fit()
        by_features, held_out, known = trainer.predict("val"), trainer.images[TRAINING:], trainer.images[:LABELLED]
        by_pixels = torch.cdist(held_out.flatten(1), known.flatten(1)).argmin(1)
        right = (trainer.labels[by_pixels] == trainer.labels[TRAINING:]).float().mean()
        nearest = {f"nearest by pixels, {right:.0%} right": by_pixels, "nearest by features": by_features}
        grids = {"held out": held_out[:30]} | {name: known[found[:30]] for name, found in nearest.items()}
        report(trainer, "val/accuracy", grids, columns=6)
