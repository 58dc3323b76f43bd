"""Mistakes that mypy and pyright are to find: each line that ends in a comment `error`, and no other.

Never run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import dream_trainer
from dream_trainer import EMA, AbstractTrainer, Callback, DreamTrainer, DreamTrainerConfig, TrainingParameters
from dream_trainer.simple import Trainer as Simple


@dataclass
class MyConfig(DreamTrainerConfig):
    width: int = 64


class MyTrainer(DreamTrainer):
    config: MyConfig

    def configure_models(self) -> None:
        self.config.widht  # error
        self.width: str = self.config.width  # error

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward()  # error
        self.log("loss", 1.0, reduce="average")  # error
        return {}

    def pre_epoch(self, epoch: int) -> None:  # error
        pass

    def post_fit(self) -> None:
        self.parameters()  # error
        self.global_step = 3  # error
        self(1)  # error


class Late(Callback):
    def post_epoch(self, trainer: AbstractTrainer) -> None:
        trainer.evaluate()  # error
        trainer.gloabl_step  # error
        trainer.traning = False  # error
        trainer.get_callback(EMA).decya  # error
        trainer.get_callback(int)  # error

    def post_fit(self) -> None:  # error
        pass


def run() -> None:
    from dream_trainer import Trainers  # error
    from dream_trainer.callbacks import EarlyStoping  # error
    from dream_trainer.config import FsdpParameters  # error
    from dream_trainer.data import DataLoder  # error
    from dream_trainer.loggers import Wandb  # error
    from dream_trainer.trainer.mixins import CheckpointsMixin  # error

    dream_trainer.Dreams  # error
    config = MyConfig(project="p", group="g", experiment="e", widht=3)  # error
    TrainingParameters(on_nonfinite="ignore")  # error
    trainer = MyTrainer(config)
    trainer.config = 3  # error
    MyTrainer("config")  # error
    trainer.evaluate()["val/loss"].items()  # error
    Simple(torch.nn.Linear(2, 1), train=[], optimizer="addam")  # error
    Simple(torch.nn.Linear(2, 1), train=[], epoch=3)  # error
    Simple(torch.nn.Linear(2, 1), train=[]).fit(3)  # error
