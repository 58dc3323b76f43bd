"""Draws handwritten digits with a generator that learns from a critic (WGAN-GP, Gulrajani et al. 2017).

    python examples/gan.py
    torchrun --nproc-per-node=2 examples/gan.py

Two models, two optimizers and a penalty on a gradient in one `training_step`. The digits of 8 x 8 pixels come with
scikit-learn. At the end a picture shows how far the draws were from the digits, and the same draws at four moments.
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

NOISE = 16


@dataclass(kw_only=True)
class GANConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take less than a minute on one CPU core."""

    width: int = 32
    learning_rate: float = 5e-4
    """Of both Adams."""
    critic_turns: int = 2
    """Steps of the critic for one of the generator."""
    penalty: float = 10.0
    """Weight of the penalty that holds the length of the critic's gradient near 1."""


class NoisyDigits(TensorDataset):
    """A digit [1, 8, 8] from -1 to 1, noise [NOISE] for the generator, and a share [1, 1, 1] for the penalty."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        # What is drawn here is of seed, epoch and index: the same on any number of ranks, and after a resume.
        return *super().__getitem__(index), torch.randn(NOISE), torch.rand(1, 1, 1)


class GAN(dt.DreamTrainer):
    """A generator and its critic, trained in turns."""

    config: GANConfig

    def configure_models(self) -> None:
        width = self.config.width
        self.generator = nn.Sequential(
            nn.Sequential(nn.Linear(NOISE, 32 * width), nn.Unflatten(1, (2 * width, 4, 4))),
            nn.Sequential(nn.GroupNorm(8, 2 * width), nn.ReLU(), nn.ConvTranspose2d(2 * width, width, 4, 2, 1)),
            nn.Sequential(nn.GroupNorm(8, width), nn.ReLU(), nn.Conv2d(width, 1, 3, 1, 1), nn.Tanh()),
        )
        self.critic = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, width, 3, 1, 1), nn.LeakyReLU(0.2)),
            nn.Sequential(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2)),
            nn.Sequential(nn.Flatten(), nn.Linear(32 * width, 1)),
        )

    def configure_dataloaders(self) -> tuple[DataLoader, None]:
        digits: Any = load_digits()
        self.images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None]
        self.draws = dict[int, Tensor]()
        batch_size = self.config.training_parameters.train_batch_size
        return DataLoader(NoisyDigits(self.images), batch_size, shuffle=True, drop_last=True), None

    def configure_optimizers(self) -> None:
        rate = self.config.learning_rate
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=rate, betas=(0.0, 0.9))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=rate, betas=(0.0, 0.9))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        real, noise, share = batch
        with torch.no_grad():
            fake = self.generator(noise)
        distance = self.critic(real).mean() - self.critic(fake).mean()
        penalty = self.gradient_penalty(share * real + (1 - share) * fake)
        self.backward(self.config.penalty * penalty - distance)
        is_generators_turn = self.global_step % self.config.critic_turns == 0
        if is_generators_turn:
            with self.frozen(self.critic):
                self.backward(-self.critic(self.generator(noise)).mean())
        self.step(self.critic, self.critic_optimizer)
        if is_generators_turn:
            self.step(self.generator, self.generator_optimizer)
        return {"distance": distance, "penalty": penalty}

    def gradient_penalty(self, images: Tensor) -> Tensor:
        """How far the lengths of the critic's gradients at images [batch, 1, 8, 8] are from 1, squared."""
        images = images.requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(images).sum(), images, create_graph=True)
        return (gradient.flatten(1).norm(dim=1) - 1).square().mean()

    @torch.no_grad()
    def post_epoch(self) -> None:
        noise = torch.randn(500, NOISE, generator=torch.Generator().manual_seed(0))
        images = self.generator(noise.to(self.world.device)).cpu()
        self.log("energy_distance", energy_distance(images, self.images))
        self.draws[self.global_step] = images[:16]

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = state["draws"]


def energy_distance(some: Tensor, others: Tensor) -> Tensor:
    """How far two sets of images are from having one distribution (Szekely and Rizzo 2013), for which it is 0."""
    some, others = some.flatten(1), others.flatten(1)
    return 2 * torch.cdist(some, others).mean() - torch.cdist(some, some).mean() - torch.cdist(others, others).mean()


def picture(trainer: GAN) -> Figure:
    """The energy distance over the steps, and draws of four moments beside real digits."""
    moments = list(trainer.draws.items())
    shown = [moments[round(part * (len(moments) - 1) / 3)] for part in range(4)]
    grids = [(f"step {step}", images) for step, images in shown] + [("real digits", trainer.images[:16])]
    figure = Figure(figsize=(12, 2.8), layout="constrained")
    curve, *places = figure.subplots(1, 6, width_ratios=(1.6, 1, 1, 1, 1, 1))
    curve.plot(*zip(*trainer.history_of("energy_distance"), strict=True))
    curve.set(xlabel="optimizer step", ylabel="energy distance", yscale="log")
    for axes, (name, images) in zip(places, grids, strict=True):
        tiles = F.pad(images.view(4, 4, 8, 8), (1, 1, 1, 1), value=-1).transpose(1, 2)
        axes.imshow(tiles.reshape(40, 40).numpy(), cmap="gray_r", vmin=-1, vmax=1)
        axes.set(title=name, xticks=[], yticks=[])
    return figure


def main() -> None:
    """Trains from the command line, then shows what came of it."""
    config = GANConfig(
        project="examples",
        group="gan",
        experiment="digits",
        training_parameters=dt.TrainingParameters(n_epochs=40, global_batch_size=64),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=10),
        logger_parameters=dt.LoggerParameters(log_every_n_steps=28),
    )
    with GAN(parse(config)) as trainer:
        trainer.fit()
        if trainer.world.is_main:
            path = trainer.run_dir / "digits.png"
            picture(trainer).savefig(path, dpi=90, bbox_inches="tight")
            print(f"energy distance: {trainer.history_of('energy_distance')[-1][1]:.3f}; picture: {path}")


if __name__ == "__main__":
    main()
