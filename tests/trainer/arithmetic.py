"""One small language-like model, trained by Dream Trainer and by a loop written by hand, to compare the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from dream_trainer import (
    BaseTrainer,
    BaseTrainerConfig,
    DeviceParameters,
    FSDPConfigMixin,
    FSDPMixin,
    SetupConfigMixin,
    SetupMixin,
    TrainingParameters,
)
from dream_trainer.data.loader import DistributedDataLoader

VOCABULARY, WIDTH, LENGTH, BATCH = 11, 8, 6, 3


@dataclass(frozen=True)
class Case:
    """One cell of the parity matrix."""

    mode: str = "single"
    world_size: int = 1
    accumulation: int = 1
    short_window: bool = False
    weighted: bool = False
    clip: float | None = None
    tied: bool = False
    optimizer: str = "sgd"
    sync_policy: str = "no_sync"

    @property
    def n_samples(self) -> int:
        """Three whole windows, and with a short one a single micro-batch of each rank more."""
        chunk = BATCH * self.world_size
        return 3 * chunk * self.accumulation + (chunk if self.short_window else 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tokens(torch.utils.data.Dataset):
    """Sequences whose padded part has target -100; some have a single real token."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randint(VOCABULARY, (length, LENGTH), generator=generator)
        self.targets = torch.randint(VOCABULARY, (length, LENGTH), generator=generator)
        for row in range(length):
            self.targets[row, 1 + row * 5 % LENGTH :] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@dataclass
class Config(BaseTrainerConfig, SetupConfigMixin, FSDPConfigMixin):
    case: Case = Case()


class Trained(BaseTrainer, SetupMixin):
    """Records what the hand-written loop is compared with."""

    config: Config

    def configure_models(self) -> None:
        self.model = Model(self.config.case.tied)

    def init_weights(self) -> None:
        fill(self.model)

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.config.case.optimizer, self.model)
        self.losses: list[list[float]] = []
        self.norms: list[float] = []

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DistributedDataLoader(Tokens(self.config.case.n_samples), BATCH, drop_last=False), None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        count = (targets != -100).sum()
        self.backward(loss, weight=count if self.config.case.weighted else None)
        self.losses.append([self.global_step, loss.item(), count.item()])
        if not self.is_accumulating_gradients:
            self.norms.append(self.step(self.model, self.optimizer).item())
        return {"loss": loss}


class Sharded(Trained, FSDPMixin):
    pass


def fill(model: nn.Module) -> None:
    """The same weights for both sides, from no random number at all."""
    with torch.no_grad():
        for number, parameter in enumerate(dict(model.named_parameters()).values()):
            values = torch.arange(parameter.numel(), dtype=torch.float64) * 0.37 + number
            parameter.copy_(0.3 * torch.sin(values).reshape(parameter.shape))


def run_trainer(case: Case) -> dict[str, Any]:
    """Trains `case` for two epochs on this rank."""
    devices = {
        "single": DeviceParameters(device="cpu"),
        "replicate": DeviceParameters(device="cpu"),
        "fsdp": DeviceParameters(device="cpu"),
        "hsdp": DeviceParameters(device="cpu", dp_shard=2, dp_replicate=case.world_size // 2 or 1),
    }
    config = Config(
        project="tests",
        group="parity",
        experiment="case",
        device_parameters=devices[case.mode],
        training_parameters=TrainingParameters(
            n_epochs=2,
            train_batch_size=BATCH,
            gradient_accumulation_steps=case.accumulation,
            gradient_clip_val=case.clip,
            sync_policy=case.sync_policy,
        ),
        case=case,
    )
    trainer = (Sharded if case.mode in ("fsdp", "hsdp") else Trained)(config)
    trainer.fit()
    weights = {name: full(p).detach().clone() for name, p in trainer.model.named_parameters()}
    result = {"weights": weights, "norms": trainer.norms, "losses": trainer.losses, "steps": trainer.global_step}
    trainer.close()
    return result


def full(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    """Trains several cases of one world size, one after the other, on this rank."""
    return [run_trainer(case) for case in cases]


def reference(case: Case) -> dict[str, Any]:
    """The same training by hand: one process, all micro-batches of all ranks, no framework."""
    model = Model(case.tied)
    fill(model)
    optimizer = make_optimizer(case.optimizer, model)
    data = Tokens(case.n_samples)
    norms, losses = [], []
    window = BATCH * case.world_size * case.accumulation
    for _ in range(2):
        for start in range(0, case.n_samples, window):
            starts = range(start, min(start + window, case.n_samples), BATCH)
            terms = []
            for first in starts:
                rows = slice(first, first + BATCH)
                inputs, targets = data.inputs[rows], data.targets[rows]
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                weight = int((targets != -100).sum()) if case.weighted else 1
                terms.append((loss, weight))
            total = sum(weight for _, weight in terms)
            (sum(loss * weight for loss, weight in terms) / total).backward()
            norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
            if case.clip is not None and norm > case.clip:
                for p in model.parameters():
                    p.grad *= case.clip / (norm + 1e-6)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(norm.item())
            losses.append([loss.item() for loss, _ in terms])
    return {"weights": {n: p.detach() for n, p in model.named_parameters()}, "norms": norms, "losses": losses}
