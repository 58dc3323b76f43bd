"""`pytorch_before.py` as a trainer.

    python examples/coming_from/pytorch_after.py
    torchrun --nproc-per-node=2 examples/coming_from/pytorch_after.py

From the weights that `pytorch_before.py` started from, its losses:

    python examples/coming_from/pytorch_after.py --checkpoint.init-from initial.pt
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from digits import Net, digits
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from dream_trainer import (
    CheckpointParameters,
    DreamTrainer,
    DreamTrainerConfig,
    LoggerParameters,
    TrainingParameters,
    parse,
)


@dataclass(kw_only=True)
class DigitsConfig(DreamTrainerConfig):
    learning_rate: float = 5e-3


class Digits(DreamTrainer):
    config: DigitsConfig

    def configure_models(self):
        self.model = Net()

    def configure_dataloaders(self):
        sizes = self.config.training_parameters
        return DataLoader(digits("train"), self.micro_batch_size), DataLoader(digits("val"), sizes.val_batch_size)

    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate, weight_decay=0.05)

    def configure_schedulers(self):
        self.scheduler = OneCycleLR(self.optimizer, max_lr=self.config.learning_rate, total_steps=self.total_steps)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        return {"accuracy": (self.model(images).argmax(1) == labels).float().mean()}


def main(arguments=None):
    config = DigitsConfig(
        project="examples",
        group="coming_from",
        experiment="pytorch",
        training_parameters=TrainingParameters(
            n_epochs=2, train_batch_size=32, global_batch_size=64, val_batch_size=64, gradient_clip_norm=1.0
        ),
        checkpoint_parameters=CheckpointParameters(
            keep_last=1, keep_best=1, best_metric="val/accuracy", best_mode="max"
        ),
        logger_parameters=LoggerParameters(log_every_n_steps=1),
    )
    with Digits(parse(config, arguments)) as trainer:
        trainer.fit()
    return {name: [value for _, value in trainer.history_of(name)] for name in ("train/loss", "val/accuracy")}


if __name__ == "__main__":
    main()
