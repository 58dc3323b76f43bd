"""What a user with a type checker writes. It is checked, by mypy in strict mode and by pyright, and never run.

`assert_type` fails in a checker that infers anything else: `Any` too.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, assert_type

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer
from dream_trainer import (
    EMA,
    AbstractTrainer,
    BaseTrainer,
    BaseTrainerConfig,
    Callback,
    CallbackCollection,
    CheckpointConfigMixin,
    CheckpointMixin,
    CheckpointParameters,
    DeviceParameters,
    DreamTrainer,
    DreamTrainerConfig,
    LoadReport,
    LoggerConfigMixin,
    LoggerMixin,
    LoggerParameters,
    OptimizerParameters,
    ScheduleParameters,
    SetupConfigMixin,
    SetupMixin,
    TrainingParameters,
    build_optimizer,
    build_optimizers,
    build_schedule,
    load_weights,
)
from dream_trainer.callbacks import EarlyStopping, LoggingCallback, Progress, Throughput, TimedCallback
from dream_trainer.checkpoint.manifest import Manifest
from dream_trainer.data import DistributedDataLoader
from dream_trainer.distributed.world import World
from dream_trainer.loggers import ConsoleLogger, Logger, Stamp
from dream_trainer.simple import Trainer as Simple
from dream_trainer.trainer.mixins import EvalMixin


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class MyConfig(DreamTrainerConfig):
    """A config of the user's own, as the README has it."""

    width: int = 64
    optimizer: OptimizerParameters = field(default_factory=OptimizerParameters)
    schedule: ScheduleParameters = field(default_factory=lambda: ScheduleParameters(warmup_steps=10))
    pretrained: Path | None = None


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


class CountsWords(AbstractTrainer):
    """A mixin of the user's."""

    words_seen: int = 0

    def post_train_batch(self, result: dict[str, Any], batch_idx: int) -> None:
        self.words_seen += 1
        assert_type(self.global_step, int)
        self.log("words", self.words_seen, reduce="last")


class MyTrainer(DreamTrainer, CountsWords):
    """Everything mixed in, with a config of the user's own."""

    config: MyConfig

    def configure_models(self) -> None:
        assert_type(self.config, MyConfig)
        self.model = Net(self.config.width)

    def load_pretrained(self) -> None:
        if self.config.pretrained is not None:
            assert_type(load_weights(self.model, self.config.pretrained, strict=False), LoadReport)

    def configure_dataloaders(self) -> tuple[DataLoader[Any], DistributedDataLoader]:
        data = TensorDataset(torch.randn(64, 2), torch.zeros(64, dtype=torch.long))
        size = self.config.training_parameters.train_batch_size
        return DataLoader(data, batch_size=size, shuffle=True), DistributedDataLoader(data, size)

    def configure_optimizers(self) -> None:
        self.optimizer = build_optimizer(self.config.optimizer, self.model)
        assert_type(self.optimizer, Optimizer)

    def configure_schedulers(self) -> None:
        assert_type(self.total_steps, int | None)
        assert_type(self.planned_steps, int)
        self.scheduler = build_schedule(self.config.schedule, self.optimizer, total_steps=self.total_steps)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor | None]:
        loss = F.cross_entropy(self.model(batch.x), batch.y)
        self.backward(loss, weight=batch.y.numel())
        norm = self.step(self.model, self.optimizer, self.scheduler)
        assert_type(norm, Tensor | None)
        return {"loss": loss, "norm": norm}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"accuracy": (self.model(batch.x).argmax(1) == batch.y).float().mean()}

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        out: Tensor = self.model(batch.x)
        return out

    def configure_loggers(self) -> list[Logger]:
        return [*super().configure_loggers(), Lines()]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"tokens": self.words_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.words_seen = state["tokens"]

    def post_fit(self) -> None:
        assert_type(self.world, World)
        if self.world.is_main:
            print(self.run_dir / "done")


class Lines(Logger):
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        self.path = run_dir / "lines.txt"

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        self.path.write_text(f"{stamp.step} {metrics}")


class Small(BaseTrainer):
    """The loop alone, and no config of its own."""

    def setup(self) -> None:
        assert_type(self.config, BaseTrainerConfig)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self) -> tuple[list[Tensor], None]:
        return [torch.randn(4, 2) for _ in range(3)], None

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        self.backward(self.model(batch).square().mean())
        self.step(self.model, [self.optimizer])
        return {}


@dataclass
class PartConfig(BaseTrainerConfig, SetupConfigMixin, CheckpointConfigMixin, LoggerConfigMixin):
    lr: float = 0.1


class Part(BaseTrainer, SetupMixin, CheckpointMixin, LoggerMixin):
    config: PartConfig

    def configure_models(self) -> None:
        self.model = nn.Linear(2, 1)

    def configure_optimizers(self) -> None:
        self.optimizers = build_optimizers(OptimizerParameters(name="muon", lr=self.config.lr), self.model)
        assert_type(self.optimizers, list[Optimizer])


class Late(Callback):
    """A callback; what it is given has the interface of every trainer."""

    order = 10
    main_process_only = True

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        assert_type(trainer.named_models(), dict[str, nn.Module])
        assert_type(trainer.named_optimizers(), dict[str, Optimizer])
        assert_type(trainer.get_callback(EMA), EMA)
        assert_type(trainer.callbacks, CallbackCollection)
        assert_type(trainer.config, BaseTrainerConfig)
        assert_type(trainer.world, World)

    def post_train_batch(self, trainer: AbstractTrainer, result: dict[str, Any], batch_idx: int) -> None:
        if trainer.global_step > 100:
            trainer.request_stop("late")
            trainer.request_save()

    def on_log(self, trainer: AbstractTrainer, metrics: dict[str, float], step: int) -> None:
        print(step, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}


class Hourly(TimedCallback):
    last = -math.inf

    def is_due_by_the_clock(self) -> bool:
        return time.monotonic() - self.last >= 3600

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if self.is_due(trainer):
            self.last = time.monotonic()


class Seconds(LoggingCallback):
    began = 0.0

    def pre_epoch(self, trainer: AbstractTrainer) -> None:
        self.began = time.perf_counter()

    def post_epoch(self, trainer: AbstractTrainer) -> None:
        trainer.log(f"{self.name}/seconds", time.perf_counter() - self.began, weight=1.0, reduce="max")


def run() -> None:
    config = MyConfig(
        project="p",
        group="g",
        experiment="e",
        width=128,
        training_parameters=TrainingParameters(n_epochs=2, global_batch_size=64, on_nonfinite="skip"),
        device_parameters=DeviceParameters.fsdp(),
        checkpoint_parameters=CheckpointParameters(save_every_n_steps=100),
        logger_parameters=LoggerParameters(log_every_n_steps=5),
        callbacks=[Progress(), Throughput(), EMA(decay=0.99), Late(), Hourly(), Seconds("epoch")],
    )
    with MyTrainer(config) as trainer:
        assert_type(trainer, MyTrainer)
        trainer.fit()
        assert_type(trainer.config, MyConfig)
        assert_type(trainer.model, Net)
        assert_type(trainer.evaluate(), dict[str, float])
        assert_type(trainer.predict(DataLoader(TensorDataset(torch.randn(4, 2)))), Any)
        assert_type(trainer.history_of("train/loss"), list[tuple[int, float]])
        assert_type(trainer.history[-1], dict[str, float])
        assert_type(trainer.checkpoints(), list[Manifest])
        assert_type(trainer.save_checkpoint(), Path)
        assert_type(trainer.best, dict[str, float])
        assert_type(trainer.get_callback(EMA).order, int)
        assert_type(trainer.get_callback(Late), Late)
        assert_type(trainer.describe(), str)
        with trainer.gathered(trainer.model), trainer.autocast():
            trainer.model(torch.randn(1, 2))
    small = Small(BaseTrainerConfig(project="p", group="g", experiment="s"))
    small.fit()
    assert_type(small.global_step, int)
    dreamt = DreamTrainer(DreamTrainerConfig(project="p", group="g", experiment="d"))
    assert_type(dreamt.config, DreamTrainerConfig)
    assert_type(dreamt.config.logger_parameters, LoggerParameters)
    part = Part(PartConfig(project="p", group="g", experiment="q", lr=0.5))
    assert_type(part.config.lr, float)
    print(dream_trainer.__version__, EarlyStopping, ConsoleLogger, EvalMixin)


def without_a_class() -> None:
    def tell(trainer: Simple, epoch: int, metrics: dict[str, float]) -> None:
        trainer.stop(f"{epoch} {metrics['val/loss']}")

    model = nn.Linear(2, 1)
    data = TensorDataset(torch.randn(4, 2), torch.randn(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Simple(model, loss=nn.MSELoss(), optimizer=optimizer, train=DataLoader(data), callbacks=[tell]) as trainer:
        assert_type(trainer, Simple)
        assert_type(trainer.fit(epochs=2), list[dict[str, float]])
        assert_type(trainer.train_epoch(), dict[str, float])
        assert_type(trainer.evaluate(data), dict[str, float])
        assert_type(trainer.best, float | None)
        assert_type(trainer.dream.samples_seen, int)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    Simple(model, train=data, val={"a": data}, optimizer="sgd", lr=0.1, schedule="cosine", metrics=["mse"])
    Simple(model, train=data, optimizer=torch.optim.Adam, schedule=schedule, callbacks=[tell, EMA()])
    Simple(model, train=data, step=lambda model, batch: {"loss": model(batch).mean()}, optimizer=OptimizerParameters())
