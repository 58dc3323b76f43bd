"""Balances a pole on a cart by proximal policy optimization (PPO, Schulman et al. 2017).

    python examples/ppo.py
    torchrun --nproc-per-node=2 examples/ppo.py

A sample of the loader is the luck of one episode: where it begins, and a number for each action. So episodes follow
from the seed, on any number of ranks, and a resumed run has nothing to catch up on. At the end a picture shows the
returns, and the poles that the trained policy holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader, Dataset, default_collate

import dream_trainer as dt
from dream_trainer import Progress, parse

LONGEST = 200  # moves of an episode, 0.02 seconds each


@dataclass(kw_only=True)
class PPOConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take less than a minute on one CPU core."""

    learning_rate: float = 3e-3
    turns: int = 8
    """Optimizer steps on the episodes of one batch."""
    clip: float = 0.2
    """How far a probability may move from that of the policy that played, as a share of it."""
    discount: float = 0.99
    trace: float = 0.95
    """How far advantages look ahead (lambda of GAE); 1 looks to the end of the episode."""


class Luck(Dataset[tuple[Tensor, Tensor]]):
    """The start [4] of an episode, and a number from 0 to 1 for each of its actions [LONGEST]."""

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes

    def __len__(self) -> int:
        return self.episodes

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(4) * 0.1 - 0.05, torch.rand(LONGEST)  # of seed, epoch and index: the same on any rank


def move(state: Tensor, right: Tensor) -> Tensor:
    """Position, speed, angle and turning [episodes, 4] of carts 0.02 s after a push (Barto, Sutton, Anderson 1983)."""
    _, speed, angle, turning = state.unbind(1)
    push = (20 * right - 10 + 0.05 * turning.square() * angle.sin()) / 1.1
    turned = (9.8 * angle.sin() - angle.cos() * push) / (2 / 3 - 0.05 * angle.cos().square() / 1.1)
    pushed = push - 0.05 * turned * angle.cos() / 1.1
    return state + 0.02 * torch.stack([speed, pushed, turning, turned], dim=1)


def log_probability(logit: Tensor, right: Tensor) -> Tensor:
    """Of a push to the right (1) or to the left (0)."""
    return logsigmoid(torch.where(right > 0, logit, -logit))


class PPO(dt.DreamTrainer):
    """Policy and critic are one network: a logit and a value for each state."""

    config: PPOConfig

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config.learning_rate)

    def configure_dataloaders(self) -> tuple[DataLoader, DataLoader]:
        sizes = self.config.training_parameters
        episodes = (sizes.global_batch_size or 32) // self.world.dp_size
        return DataLoader(Luck(320), episodes), DataLoader(Luck(64), sizes.val_batch_size)

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
                standing = standing * (state[:, 0].abs() < 2.4) * (state[:, 2].abs() < 0.21)
        states, right, alive, logits, values = (torch.stack(each, dim=1) for each in zip(*played, strict=True))
        return states[:, :-1], right[:, :-1], alive[:, :-1], logits[:, :-1], values

    def advantages(self, alive: Tensor, values: Tensor) -> Tensor:
        """Generalised advantage estimates [episodes, LONGEST] (Schulman et al. 2016); a move is worth 0.01."""
        errors, ahead = 0.01 * alive + self.config.discount * values[:, 1:] - values[:, :-1], torch.zeros_like(values)
        for step in reversed(range(LONGEST)):
            later = self.config.discount * self.config.trace * ahead[:, step + 1]
            ahead[:, step] = (errors[:, step] + later) * alive[:, step]
        return ahead[:, :-1]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        states, right, alive, logits, values = self.play(*batch)
        played, found = log_probability(logits, right), self.advantages(alive, values)
        targets = found + values[:, :-1]
        # Mean and deviation over the moves of all ranks.
        sums = torch.stack([alive.sum(), (found * alive).sum(), (found.square() * alive).sum()])
        moves, total, squares = self.world.all_reduce(sums.cpu()).tolist()
        found = (found - total / moves) / (squares / moves - (total / moves) ** 2) ** 0.5
        for _ in range(self.config.turns):
            logits, values = self.model(states).unbind(2)
            ratio = (log_probability(logits, right) - played).exp()
            gain = torch.minimum(ratio * found, ratio.clamp(1 - self.config.clip, 1 + self.config.clip) * found)
            loss = (((values - targets).square() - gain) * alive).sum() / alive.sum()
            self.backward(loss, weight=alive.sum())  # some episodes end early; each move counts the same
            self.step(self.model, self.optimizer)
        self.log("train/return", alive.sum(1).mean(), weight=len(alive))  # each episode counts the same
        return {}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        start, luck = batch
        return {"return": self.play(start, torch.full_like(luck, 0.5))[2].sum(1).mean()}  # always the likelier action


def picture(trainer: PPO, states: Tensor, alive: Tensor) -> Figure:
    """Returns over the steps, and the angles of the poles of some episodes."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("train/return", "val/return"):
        left.plot(*zip(*trainer.history_of(name), strict=True), label=name)
    left.axhline(LONGEST, color="grey", linestyle=":", label="the longest")
    left.set(xlabel="batches of episodes", ylabel="moves until the pole falls", ylim=(0, None))
    left.legend()
    for angles, moves in zip(states[:, :, 2].rad2deg().cpu(), alive.sum(1).int(), strict=True):
        right.plot(angles[:moves], linewidth=0.8)
    right.axhspan(-12, 12, color="grey", alpha=0.1)
    right.set(xlabel="move", ylabel="angle of the pole in degrees", title="16 poles held by the trained policy")
    return figure


def main() -> None:
    """Trains from the command line, then shows what came of it."""
    config = PPOConfig(
        project="examples",
        group="ppo",
        experiment="cart_pole",
        training_parameters=dt.TrainingParameters(
            n_epochs=8, global_batch_size=32, gradient_clip_norm=0.5, val_every_n_steps=5, val_every_n_epochs=1
        ),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",), log_every_n_steps=1),
        callbacks=[Progress(metrics=("train/return", "val/return"))],
    )
    with PPO(parse(config)) as trainer:
        trainer.fit()
        start, luck = default_collate([Luck(16)[index] for index in range(16)])
        states, _, alive, *_ = trainer.play(start.to(trainer.world.device), luck.to(trainer.world.device))
        if trainer.world.is_main:
            path = trainer.run_dir / "cart_pole.png"
            picture(trainer, states, alive).savefig(path, dpi=90, bbox_inches="tight")
            print(f"return: {trainer.history_of('val/return')[-1][1]:.0f} of {LONGEST}; picture: {path}")


if __name__ == "__main__":
    main()
