"""Draws handwritten digits with two models, two optimizers and a gradient penalty (WGAN-GP, Gulrajani et al. 2017).

python examples/gan.py
torchrun --nproc-per-node=2 examples/gan.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from digits import digits, energy_distance
from pictures import report
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dream_trainer as dt

NOISE = 16
CRITIC_TURNS = 2  # steps of the critic for one of the generator
PENALTY = 10.0  # its weight, which holds the length of the critic's gradient near 1


@dataclass(kw_only=True)
class GANConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take less than a minute on one CPU core."""

    width: int = 32
    learning_rate: float = 5e-4


def with_draws(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An image, noise for the generator, and a share for the penalty, drawn by seed, epoch and index: on any ranks."""
    return image, torch.randn(NOISE), torch.rand(1, 1, 1)


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

    def configure_dataloaders(self) -> tuple[DataLoader[tuple[Tensor, ...]], None]:
        self.images, self.draws = digits()[0] * 2 - 1, dict[int, Tensor]()
        self.register_state("draws", lambda: self.draws, self.draws.update)  # kept in checkpoints
        samples = dt.data.TransformedDataset(self.images, [dt.data.Map(with_draws)])
        return DataLoader(samples, self.micro_batch_size, shuffle=True, drop_last=True), None

    def configure_optimizers(self) -> None:
        rate = self.config.learning_rate
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=rate, betas=(0.0, 0.9))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=rate, betas=(0.0, 0.9))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        real, noise, share = batch
        with torch.no_grad():
            fake = self.generator(noise)
        distance = self.critic(real).mean() - self.critic(fake).mean()
        between = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        self.backward(PENALTY * penalty - distance)
        is_generators_turn = self.global_step % CRITIC_TURNS == 0
        if is_generators_turn:
            with self.frozen(self.critic):
                self.backward(-self.critic(self.generator(noise)).mean())
        self.step(self.critic, self.critic_optimizer)
        if is_generators_turn:
            self.step(self.generator, self.generator_optimizer)
        return {"distance": distance, "penalty": penalty}

    @torch.no_grad()
    def post_epoch(self) -> None:
        noise = torch.randn(500, NOISE, generator=torch.Generator().manual_seed(0))
        images = self.generator(noise.to(self.world.device)).cpu()
        self.log("energy_distance", energy_distance(images, self.images))
        self.draws[self.global_step] = images[:16]


if __name__ == "__main__":
    sizes = dt.TrainingParameters(n_epochs=40, global_batch_size=64)
    config = GANConfig(project="examples", group="gan", experiment="digits", training_parameters=sizes)
    with GAN.from_cli(config) as trainer:
        trainer.fit()
        moments = list(trainer.draws.items())
        shown = [moments[part * (len(moments) - 1) // 3] for part in range(4)]
        grids = {f"step {step}": images for step, images in shown} | {"real digits": trainer.images[:16]}
        report(trainer, "energy_distance", grids, columns=4, yscale="log")
