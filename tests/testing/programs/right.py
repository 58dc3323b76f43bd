"""Trainers without a mistake, of kinds that a check could take for one."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dream_trainer as dt
from dream_trainer.modules import MoE
from tests.testing.programs.common import Changed, Small, default_config as small_config, points


def default_config() -> dt.DreamTrainerConfig:
    return small_config()


class Plain(Small):
    """As it is."""


class Dropout(Small):
    """Random layers, which draw other numbers on each rank."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 2))


class BatchNorm(Small):
    """Statistics of a micro-batch."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


class SavedState(Small):
    """A running mean that is saved, and one of the best losses."""

    mean = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.backward(loss * self.mean)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss(batch), "scaled": self.loss(batch) * self.mean}

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.mean = 0.5 * self.mean + 0.5 * metrics["val/loss"]

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Rows of unequal length."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randint(1, 9, (12,), generator=torch.Generator().manual_seed(index))
        labels = row.roll(-1).masked_fill(torch.arange(12) >= 2 + index % 10, -100)
        return row, labels


class WeightedTokens(Small):
    """Means over unequal numbers of tokens, with their weights."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10))

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DataLoader(Tokens(), 8, shuffle=True), DataLoader(Tokens(), 8)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.backward(loss, weight=(batch[1] != -100).sum())
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch)}, (batch[1] != -100).sum()


class Adversaries(Small):
    """Two models and two optimizers."""

    def configure_models(self) -> None:
        self.model = nn.Linear(4, 6)
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        real, noise = batch[0], batch[0][:, :4].sin()
        distance = self.critic(self.model(noise).detach()).mean() - self.critic(real).mean()
        self.backward(distance + sum(p.square().sum() for p in self.critic.parameters()))
        with self.frozen(self.critic):
            self.backward(-self.critic(self.model(noise)).mean())
        self.step(self.critic, self.critic_optimizer)
        self.step(self.model, self.optimizer)
        return {"distance": distance}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"score": self.critic(batch[0]).mean()}


class GatheredContrast(Small):
    """A loss over the samples of all ranks."""

    def configure_models(self) -> None:
        self.model = nn.Linear(6, 8)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        train = DataLoader(self.dataset(), 16 // self.world.dp_size, shuffle=True)
        return train, DataLoader(TensorDataset(*points(24)), 8)

    def loss(self, batch: Any) -> Tensor:
        one, other = (F.normalize(self.model(view), dim=1) for view in (batch[0], batch[0].flip(1)))
        one, other = self.of_all_ranks(one), self.of_all_ranks(other)
        return F.cross_entropy(5 * one @ other.T, torch.arange(len(one)))

    def of_all_ranks(self, rows: Tensor) -> Tensor:
        return self.world.all_gather_with_gradient(rows)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"norm": self.model(batch[0]).norm(dim=1).mean()}


class Everyday(Small):
    """A schedule, clipping, decay, an average of the weights, and thawing by the epoch's number."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model[0].requires_grad_(False)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def configure_schedulers(self) -> None:
        self.scheduler = CosineAnnealingLR(self.optimizer, self.total_steps or 10)

    def pre_epoch(self) -> None:
        self.model[0].requires_grad_(self.current_epoch >= 1)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.backward(loss)
        return {"loss": loss, "norm": self.step(self.model, self.optimizer, self.scheduler)}


def everyday() -> Everyday:
    config = small_config(callbacks=[dt.EMA(decay=0.9)])
    config.training_parameters = dt.TrainingParameters(
        n_epochs=8, global_batch_size=16, gradient_clip_norm=0.5, val_every_n_epochs=1
    )
    return Everyday(config)


class Caches(Small):
    """Attributes that need no saving: a cache, a time, the last batch."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.masks = vars(self).get("masks", {})
        key = int(self.global_step) % 5
        if key not in self.masks:
            self.masks[key] = torch.full((1,), 1.0 + key)
        self.last, self.began = batch[0].clone(), time.perf_counter()
        loss = self.loss(batch) * self.masks[key].squeeze()
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss, "seconds": time.perf_counter() - self.began}


SCALE = 0.1


class Noisy(Changed):
    """Samples with noise from the global generators."""

    def change(self, x: Tensor) -> Tensor:
        return x + SCALE * torch.randn(6)


class Denoiser(Small):
    """Noise drawn in the step, and in the samples."""

    def dataset(self) -> Any:
        return Noisy()

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1])


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    batch = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return batch, batch.roll(-1, 1).masked_fill(batch.roll(-1, 1) == 0, -100)


class PaddedByBatch(WeightedTokens):
    """Rows that are padded to the longest of their micro-batch."""

    def configure_dataloaders(self) -> tuple[Any, Any]:
        rows = [row[: 3 + index % 9] for index, (row, _) in enumerate(map(Tokens().__getitem__, range(80)))]
        return DataLoader(rows, 8, shuffle=True, collate_fn=padded), DataLoader(rows, 8, collate_fn=padded)  # type: ignore[arg-type]


class Experts(Small):
    """A mixture of experts, which ranks may share."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 16), MoE(16, 8, 4, 2), nn.Linear(16, 2))


class Plateau(Small):
    """A rate that follows the validation."""

    def configure_schedulers(self) -> None:
        self.scheduler = ReduceLROnPlateau(self.optimizer, patience=0, threshold=0.5)

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.scheduler.step(metrics["val/loss"])


class ThawOnce(Small):
    """Which parameters are trained is in checkpoints."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model[0].requires_grad_(False)

    def pre_epoch(self) -> None:
        if self.current_epoch == 1:
            self.model[0].requires_grad_(True)
