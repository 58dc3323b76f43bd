"""Balances a pole on a cart by proximal policy optimization (PPO, Schulman et al. 2017).

python examples/ppo.py
torchrun --nproc-per-node=2 examples/ppo.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cart_pole import LONGEST, advantages, episodes, move, stands
from pictures import curves, save
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.utils.data import DataLoader

import dream_trainer as dt

TURNS = 8  # optimizer steps on the episodes of one batch
CLIP = 0.2  # how far a probability may move from that of the policy that played, as a share of it


@dataclass(kw_only=True)
class PPOConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take less than a minute on one CPU core."""

    learning_rate: float = 3e-3


class PPO(dt.DreamTrainer):
    """Policy and critic are one network: a logit and a value for each state."""

    config: PPOConfig

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config.learning_rate)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        sizes = self.config.training_parameters
        batch_size = (sizes.global_batch_size or 32) // self.world.dp_size  # of each rank, which accumulates nothing
        return DataLoader(episodes(320), batch_size), DataLoader(episodes(64), sizes.val_batch_size)

    @torch.no_grad()
    def play(self, state: Tensor, luck: Tensor) -> tuple[Tensor, ...]:
        """Plays all episodes to the longest: states, actions, whether the pole still stood, logits and values."""
        played: list[tuple[Tensor, ...]] = []
        standing = torch.ones_like(state[:, 0])
        with self.gathered(self.model):  # whole on each rank meanwhile: nothing is sent at each move
            for step in range(LONGEST + 1):
                logit, value = self.model(state).unbind(1)
                right = (luck[:, step % LONGEST] < logit.sigmoid()).float()
                played.append((state, right, standing, logit, value * standing))
                state = move(state, right)
                standing = standing * stands(state)
        states, right, alive, logits, values = (torch.stack(each, dim=1) for each in zip(*played, strict=True))
        return states[:, :-1], right[:, :-1], alive[:, :-1], logits[:, :-1], values

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        states, right, alive, logits, values = self.play(*batch)
        played, found = Bernoulli(logits=logits).log_prob(right), advantages(alive, values)
        targets = found + values[:, :-1]
        sums = torch.stack([alive.sum(), (found * alive).sum(), (found.square() * alive).sum()])
        moves, total, squares = self.world.all_reduce(sums.cpu()).tolist()  # of all ranks
        found = (found - total / moves) / (squares / moves - (total / moves) ** 2) ** 0.5
        for _ in range(TURNS):
            logits, values = self.model(states).unbind(2)
            ratio = (Bernoulli(logits=logits).log_prob(right) - played).exp()
            gain = torch.minimum(ratio * found, ratio.clamp(1 - CLIP, 1 + CLIP) * found)
            loss = (((values - targets).square() - gain) * alive).sum() / alive.sum()
            self.backward(loss, weight=alive.sum())  # some episodes end early; each move counts the same
            self.step(self.model, self.optimizer)
        self.log("train/return", alive.sum(1).mean(), weight=len(alive))  # each episode counts the same
        return {}

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Angles of the poles in degrees [episodes, LONGEST], NaN once one has fallen; of the likelier actions."""
        states, _, alive, *_ = self.play(batch[0], torch.full_like(batch[1], 0.5))
        return states[:, :, 2].rad2deg().where(alive > 0, torch.nan)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"return": self.predict_step(batch, batch_idx).isfinite().sum(1).float().mean()}


if __name__ == "__main__":
    sizes = dt.TrainingParameters(n_epochs=8, global_batch_size=32, gradient_clip_norm=0.5, val_every_n_steps=5)
    config = PPOConfig(project="examples", group="ppo", experiment="cart_pole", training_parameters=sizes)
    with PPO.from_cli(config) as trainer:
        trainer.fit()
        angles = trainer.predict("val")
        if trainer.world.is_main:
            returns = {name: trainer.history_of(name) for name in ("train/return", "val/return")}
            figure, (right,) = curves(returns, "moves until the pole falls", beside=[1], xlabel="batches")
            right.plot(angles[:16].T, linewidth=0.8)
            right.set(xlabel="move", ylabel="angle of 16 poles in degrees")
            save(trainer, figure, "val/return")
