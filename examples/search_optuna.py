"""A search over hyperparameters with Optuna: one objective for one process and for many.

    python examples/search_optuna.py --trials 20
    torchrun --nproc-per-node=2 examples/search_optuna.py --trials 20

Trials that cannot win are pruned: all ranks stop at the same step. Killed at any time, the same command goes on: the
trial that was running continues from its last checkpoint, with the values that it had. See trials.py.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from digits import digits
from optuna.distributions import CategoricalDistribution, FloatDistribution
from torch import nn
from torch.utils.data import TensorDataset
from trials import Report, search

import dream_trainer as dt

SPACE = {
    "lr": FloatDistribution(1e-4, 1e-1, log=True),
    "hidden": CategoricalDistribution([16, 64, 256]),
    "dropout": FloatDistribution(0.0, 0.5),
}


@dataclass(kw_only=True)
class DigitsConfig(dt.recipes.ClassifierConfig):
    """What a trial may choose, beside the learning rate."""

    hidden: int
    dropout: float


class Digits(dt.recipes.Classifier):
    """Handwritten digits of 8 x 8: 1,280 to train on, 517 to validate."""

    config: DigitsConfig

    def configure_models(self) -> None:
        hidden, dropout = self.config.hidden, nn.Dropout(self.config.dropout)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), dropout, nn.Linear(hidden, 10))

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        images, labels = digits()
        return TensorDataset(images[:1280], labels[:1280]), TensorDataset(images[1280:], labels[1280:])


def train(run: str, values: dict[str, Any], report: Report, *, epochs: int) -> float:
    """One trial on every rank; resumes if `run` has been started before. Returns the best accuracy."""
    batch_size = 64 // int(os.environ.get("WORLD_SIZE", 1))  # as many samples a step on any number of ranks
    config = DigitsConfig(
        project="examples",
        group="search_optuna",
        experiment=run,
        hidden=values["hidden"],
        dropout=values["dropout"],
        optimizer=dt.OptimizerParameters(lr=values["lr"]),
        schedule=dt.ScheduleParameters(name="constant"),
        training_parameters=dt.TrainingParameters(n_epochs=epochs, train_batch_size=batch_size),
        device_parameters=dt.DeviceParameters.ddp(),
        checkpoint_parameters=dt.CheckpointParameters(keep_last=1, best_metric="val/accuracy"),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",)),
        callbacks=[report],
    )
    with Digits(config) as trainer:
        trainer.fit()
        return trainer.best["val/accuracy"]


def main() -> None:
    """Searches until there are enough trials, and shows the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="trials with a result, those of earlier starts included")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of a trial that is not pruned")
    parser.add_argument("--seed", type=int, default=0, help="of the sampler")
    asked = parser.parse_args()
    objective = partial(train, epochs=asked.epochs)
    search("digits", SPACE, objective, metric="accuracy", trials=asked.trials, seed=asked.seed)


if __name__ == "__main__":
    main()
