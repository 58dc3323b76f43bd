"""The complete example of the API reference, with MyDataset filled in by scikit-learn's handwritten digits.

python examples/api_example.py
torchrun --nproc_per_node=2 examples/api_example.py
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

from dream_trainer import BaseTrainer, BaseTrainerConfig, TrainingParameters
from dream_trainer.trainer.mixins import SetupConfigMixin, SetupMixin


class MyDataset(Dataset):
    """1797 handwritten digits, enlarged from 8x8 to 28x28: 1024 to train on, the rest to validate."""

    def __init__(self, split: str) -> None:
        digits: Any = load_digits()
        images = F.interpolate(torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], size=28)
        part = slice(0, 1024) if split == "train" else slice(1024, None)
        self.images, self.labels = images[part], torch.tensor(digits.target)[part]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


@dataclass
class MyConfig(BaseTrainerConfig, SetupConfigMixin):
    learning_rate: float = 1e-3
    hidden_size: int = 128


class MyTrainer(BaseTrainer, SetupMixin):
    config: MyConfig

    def configure_models(self):
        """Create model on meta device"""
        self.model = nn.Sequential(
            nn.Linear(784, self.config.hidden_size), nn.ReLU(), nn.Linear(self.config.hidden_size, 10)
        )

    def init_weights(self):
        """Initialize weights after device placement"""

        def init_fn(m):
            if isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)

        self.model.apply(init_fn)

    def configure_optimizers(self):
        """Set up optimizer"""
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config.learning_rate)

    def configure_dataloaders(self):
        """Return train and validation dataloaders"""
        train_dataset = MyDataset("train")
        val_dataset = MyDataset("val")

        train_loader = DataLoader(
            train_dataset, batch_size=self.config.training_parameters.train_batch_size, shuffle=True
        )

        val_loader = DataLoader(val_dataset, batch_size=self.config.training_parameters.val_batch_size, shuffle=False)

        return train_loader, val_loader

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x.view(x.size(0), -1))
        loss = F.cross_entropy(logits, y)

        self.backward(loss)

        if not self.is_accumulating_gradients:
            grad_norm = self.step(self.model, self.optimizer)
            accuracy = (logits.argmax(dim=1) == y).float().mean()

            return {"loss": loss, "accuracy": accuracy, "grad_norm": grad_norm}

        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        x, y = batch

        with torch.no_grad():
            logits = self.model(x.view(x.size(0), -1))
            loss = F.cross_entropy(logits, y)
            accuracy = (logits.argmax(dim=1) == y).float().mean()

        return {"val_loss": loss, "val_accuracy": accuracy}


# Usage
if __name__ == "__main__":
    config = MyConfig(
        project="mnist-classification",
        group="baseline",
        experiment="run-001",
        training_parameters=TrainingParameters(n_epochs=10, train_batch_size=32, gradient_accumulation_steps=4),
    )

    trainer = MyTrainer(config)
    trainer.fit()

    if trainer.world.is_main:
        print(f"{trainer.global_step} optimizer steps, {trainer.samples_seen} samples, on {trainer.world}")
