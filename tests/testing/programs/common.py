"""What the small trainers of this folder have in common."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dream_trainer as dt


def default_config(**fields: Any) -> dt.DreamTrainerConfig:
    parameters = dt.TrainingParameters(n_epochs=8, global_batch_size=16, train_batch_size=8, val_batch_size=8)
    return dt.DreamTrainerConfig(
        project="check", experiment="small", training_parameters=parameters, **{"callbacks": [], **fields}
    )


def points(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] * x[:, 1] > 0).long()


class Changed(Dataset[tuple[Tensor, Tensor]]):
    """The points, each as `change` makes it."""

    def __init__(self) -> None:
        self.x, self.y = points(80)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.change(self.x[index]), self.y[index]

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Small(dt.DreamTrainer):
    """A classifier of points; its classes change one thing each."""

    count, rate = 80, 0.05

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.9)

    def dataset(self) -> Any:
        return TensorDataset(*points(self.count))

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DataLoader(self.dataset(), 8, shuffle=True), DataLoader(TensorDataset(*points(24)), 8)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self.model(batch[0]), batch[1])}
