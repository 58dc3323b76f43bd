"""Classifier: cross entropy over classes, accuracy, and probabilities from `predict`.

python -m dream_trainer.recipes.classifier --config run.yaml
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from dream_trainer.config.trainer_config import DreamTrainerConfig
from dream_trainer.data import DistributedDataLoader
from dream_trainer.optim import OptimizerParameters, ScheduleParameters, build_optimizers, build_schedules
from dream_trainer.trainer.dream import DreamTrainer


@dataclass(kw_only=True)
class ClassifierConfig(DreamTrainerConfig):
    """Config of Classifier."""

    model: str = ""
    """Class or function that builds the model, as `module:name`."""
    model_arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `model`."""
    data: str = ""
    """Function that returns the training and validation datasets of `(input, label)`, as `module:name`."""
    label_smoothing: float = 0.0
    """Share of each label that is spread evenly over all classes, in training."""
    optimizer: OptimizerParameters = field(default_factory=OptimizerParameters)
    """Optimizer and its numbers."""
    schedule: ScheduleParameters = field(default_factory=lambda: ScheduleParameters(name="cosine", warmup_steps=0.05))
    """Learning rate schedule and its numbers."""


class Classifier(DreamTrainer):
    """One label for each sample."""

    if TYPE_CHECKING:
        config = cast(ClassifierConfig, ...)  # a subclass may declare a narrower type
    else:
        config: ClassifierConfig

    def configure_models(self) -> None:
        self.model: nn.Module = named(self.config.model)(**self.config.model_arguments)

    def datasets(self) -> tuple[Any, Any]:
        """Training and validation samples; None validates nothing. Override it for your own."""
        train, val = named(self.config.data)()
        return train, val

    def logits_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits [batch, classes] and labels [batch]; override it for batches in another form."""
        inputs, labels = batch
        return self.model(inputs), labels

    def configure_dataloaders(self) -> tuple[Any, Any]:
        sizes, (train, val) = self.config.training_parameters, self.datasets()
        return (
            self.loader(train, self.micro_batch_size, is_train=True),
            None if val is None else self.loader(val, sizes.val_batch_size, is_train=False),
        )

    def loader(self, dataset: Any, batch_size: int, *, is_train: bool) -> Any:
        """A loader over one of the two that `datasets` returned."""
        return DistributedDataLoader(dataset, batch_size, shuffle=is_train, drop_last=is_train, collate_fn=self.collate)

    collate: Callable[[list[Any]], Any] = staticmethod(default_collate)
    """Samples as a batch; override it to pad."""

    def configure_optimizers(self) -> None:
        self.optimizers = build_optimizers(self.config.optimizer, self.model)

    def configure_schedulers(self) -> None:
        self.schedulers = build_schedules(self.config.schedule, self.optimizers, total_steps=self.total_steps)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor | None]:
        loss = F.cross_entropy(*self.logits_and_labels(batch), label_smoothing=self.config.label_smoothing)
        self.backward(loss)
        return {"loss": loss, "grad_norm": self.step(self.model, self.optimizers, self.schedulers)}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits, labels = self.logits_and_labels(batch)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.logits_and_labels(batch)[0].softmax(1)


def named(place: str) -> Any:
    """The object at `module:name`."""
    return EntryPoint(name="", value=place, group="").load()


if __name__ == "__main__":
    with Classifier.from_cli() as trainer:
        trainer.fit()
