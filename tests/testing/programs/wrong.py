"""Trainers with one mistake each, as users report them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from tests.testing.programs.common import Changed, Small, default_config as small_config, points
from tests.testing.programs.right import BatchNorm, GatheredContrast, WeightedTokens


def default_config() -> dt.DreamTrainerConfig:
    return small_config()


# -- state that no checkpoint has


class MeanOnTrainer(Small):
    mean = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.backward(loss * self.mean)
        self.mean = 0.9 * self.mean + 0.1 * float(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}


class HistoryOnTrainer(Small):
    def pre_fit(self) -> None:
        self.losses: list[float] = []

    def post_train_batch(self, result: dict[str, Any], batch_idx: int) -> None:
        self.losses.append(float(result["loss"]))


class AverageByHand(Small):
    def pre_fit(self) -> None:
        self.shadow = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def post_train_step(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)


class FreezesByOwnCount(Small):
    passes = 0

    def pre_epoch(self) -> None:
        self.passes += 1
        self.model[0].requires_grad_(self.passes != 3)


class Lookahead(torch.optim.SGD):
    slow: list[Tensor] | None = None
    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        if self.slow is None:
            self.slow = [p.detach().clone() for p in parameters]
        super().step()
        self.count += 1
        if self.count % 3 == 0:
            for slow, fast in zip(self.slow, parameters, strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)


class OptimizerWithOwnState(Small):
    def configure_optimizers(self) -> None:
        self.optimizer = Lookahead(self.model.parameters(), lr=0.05)


class Warmup(dt.Callback):
    count = 0

    def pre_train_batch(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.01 * min(self.count, 40)


def callback_without_state() -> Small:
    return Small(small_config(callbacks=[Warmup()]))


class Levels(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.level = 0

    def change(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.level)


class CurriculumInDataset(Small):
    def dataset(self) -> Any:
        self.levels = Levels()
        return self.levels

    def post_train_step(self) -> None:
        self.levels.level += 1


class OwnGenerator(Small):
    def pre_fit(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def loss(self, batch: Any) -> Tensor:
        scale = 1 + torch.rand(1, generator=self.generator).squeeze()
        return F.cross_entropy(self.model(batch[0]) * scale, batch[1])


class CountingModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.linear(x) * min(1.0, 0.02 * self.calls)


class CountInModule(Small):
    def configure_models(self) -> None:
        self.model = CountingModule()


class CountInClass(Small):
    seen = 0

    def loss(self, batch: Any) -> Tensor:
        CountInClass.seen += 1
        return super().loss(batch) / (1 + 0.1 * CountInClass.seen)


class OwnLogOpenedAnew(Small):
    def pre_fit(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.file = (self.run_dir / f"log_{self.world.rank}.txt").open("w")

    def post_train_step(self) -> None:
        self.file.write(f"{self.global_step}\n")
        self.file.flush()


# -- ranks and micro-batches


class DatasetByRank(Small):
    def dataset(self) -> Any:
        x, y = points(self.count)
        return TensorDataset(x + self.world.rank, y)


class UnweightedTokens(WeightedTokens):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("codebook", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.codebook.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.codebook)


class CodebookPerRank(Small):
    def configure_models(self) -> None:
        self.model = Codebook()


class LocalMetric(Small):
    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DataLoader(self.dataset(), 8, shuffle=True), DataLoader(TensorDataset(*points(27)), 8)

    def pre_val_epoch(self) -> None:
        self.right, self.seen = 0, 0

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.right += int((self.model(batch[0]).argmax(1) == batch[1]).sum())
        self.seen += len(batch[1])
        return {}

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        if self.world.is_main:
            self.score = self.right / self.seen
        self.log("val/accuracy", self.right / self.seen, weight=1.0)


class DropLastByRanks(Small):
    count = 40

    def configure_dataloaders(self) -> tuple[Any, Any]:
        train = DataLoader(self.dataset(), 8, shuffle=True, drop_last=self.world.world_size > 1)
        return train, DataLoader(TensorDataset(*points(24)), 8)


class RateByRank(Small):
    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05 * (1 + self.world.rank))


class RateByWorld(Small):
    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05 * self.world.world_size)


class LossByWorld(Small):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) / self.world.world_size


class NoiseOnWeights(Small):
    @torch.no_grad()
    def post_train_step(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))


class ReadsGradient(Small):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.backward(loss)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        sharpness = sum(gradient.abs().sum() for gradient in gradients)
        for group in self.optimizer.param_groups:
            group["lr"] = float(0.05 / (1 + sharpness))
        self.step(self.model, self.optimizer)
        return {"loss": loss}


class CollectiveOnMain(Small):
    def post_train_step(self) -> None:
        if self.world.rank == 0:
            weight = self.model[0].weight.detach().clone()
            torch.distributed.is_initialized() and torch.distributed.all_reduce(weight)


class MeanOfRank(Small):
    def pre_fit(self) -> None:
        self.mean = torch.zeros(6)

    def loss(self, batch: Any) -> Tensor:
        if self.model.training:
            self.mean = self.mean.lerp(batch[0].mean(0), 0.1)
        return F.cross_entropy(self.model(batch[0] - self.mean), batch[1])


class LocalContrast(GatheredContrast):
    def of_all_ranks(self, rows: Tensor) -> Tensor:
        return rows


class ScheduleByMicroBatch(Small):
    def configure_schedulers(self) -> None:
        self.scheduler = StepLR(self.optimizer, 2, 0.8)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        self.scheduler.step()
        return result


# -- order, clock and validation


class ModulesFromSet(Small):
    def configure_models(self) -> None:
        names = {"alpha", "beta", "gamma", "delta", "epsilon", "zeta"}
        self.model = nn.ModuleDict({name: nn.Linear(6, 2) for name in names})

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(sum(part(batch[0]) for part in self.model.values()), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch)}


class Clocked(Changed):
    def change(self, x: Tensor) -> Tensor:
        return x + 1e-3 * (time.time_ns() % 1000)


class AugmentedByTime(Small):
    def dataset(self) -> Any:
        return Clocked()


class Drawing(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def change(self, x: Tensor) -> Tensor:
        return x + float(self.rng.normal())


class GeneratorInDataset(Small):
    def dataset(self) -> Any:
        return Drawing()


class UnseededWeights(Small):
    def init_weights(self) -> None:
        for parameter in self.model.parameters():
            values = np.random.default_rng().normal(size=tuple(parameter.shape))
            parameter.data.copy_(0.3 * torch.tensor(values))


class ValidationTrainsStatistics(BatchNorm):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.model.train()
        return super().validation_step(batch, batch_idx)
