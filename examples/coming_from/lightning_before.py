"""A classifier in Lightning: module, data module, schedule, metric, accumulation, callbacks.

    python examples/coming_from/lightning_before.py

`lightning_after.py` is the same as a trainer.
"""

import lightning as L
import torch
import torch.nn.functional as F
from digits import Net, digits
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        # In order, and not shuffled: so that losses can be compared step by step.
        return DataLoader(digits("train"), batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(digits("val"), batch_size=64)


class DigitsModule(L.LightningModule):
    def __init__(self, learning_rate=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val/loss", F.cross_entropy(logits, labels))
        self.log("val/accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.05)
        total_steps = self.trainer.estimated_stepping_batches
        scheduler = OneCycleLR(optimizer, max_lr=self.hparams.learning_rate, total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Record(L.Callback):
    """What the comparison reads: the losses of each optimizer step, and each validation."""

    def __init__(self):
        self.micro_batches, self.found = [], {"train/loss": [], "val/loss": [], "val/accuracy": []}

    def on_fit_start(self, trainer, module):
        torch.save(module.net.state_dict(), "initial.pt")  # what the comparison starts from

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.micro_batches.append(outputs["loss"].item())
        if len(self.micro_batches) == trainer.accumulate_grad_batches:
            # Lightning has divided each by accumulate_grad_batches.
            self.found["train/loss"].append(sum(self.micro_batches))
            self.micro_batches.clear()

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            for name in ("val/loss", "val/accuracy"):
                self.found[name].append(trainer.callback_metrics[name].item())


def main():
    L.seed_everything(42)
    record = Record()
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=CSVLogger("logs"),
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(monitor="val/accuracy", mode="max", save_top_k=1, save_last=True),
            EarlyStopping(monitor="val/loss", patience=3),
            LearningRateMonitor("step"),
            record,
        ],
    )
    trainer.fit(DigitsModule(), DigitsData())
    return record.found


if __name__ == "__main__":
    main()
