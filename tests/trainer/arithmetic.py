"""One small language-like model, trained by Dream Trainer and by a loop written by hand, to compare the two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.small import CaseConfig, case_config, fill, full

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
    branches: bool = False
    """Whether each micro-batch uses one of two heads, so that some ranks have no use for a parameter."""
    scalar: bool = False
    """Whether there is a parameter without a dimension."""
    turns: bool = False
    """Whether a second model is stepped first in each window, and frozen while the first learns through it."""
    frozen: bool = False
    """Whether the first block is not trained."""
    recompute: str = "none"

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
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight
        if case.branches:
            self.other_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if case.scalar:
            self.scale = nn.Parameter(torch.tensor(0.5))
        if case.frozen:
            self.blocks[0].requires_grad_(False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if self.case.scalar:
            x = x * self.scale.exp()
        return self.other_head(x) if self.case.branches and tokens[0, 0] % 2 else self.head(x)


class Critic(nn.Module):
    """Takes a model's scores, and is trained in turns with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, scores: Tensor) -> Tensor:
        x = self.embedding(scores)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Tokens(torch.utils.data.Dataset):
    """Sequences with unequal numbers of labels, some with a single one; the rest are -100."""

    vocabulary, row_length, seed = VOCABULARY, LENGTH, 7

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, length, self.row_length)
        self.tokens, self.labels = torch.randint(self.vocabulary, shape, generator=generator).unbind()
        for row in range(length):
            self.labels[row, 1 + row * 5 % self.row_length :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index], self.labels[index]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


class Trained(dt.BaseTrainer, dt.SetupMixin, dt.ActivationCheckpointingMixin):
    """Records what the hand-written loop is compared with."""

    config: CaseConfig

    def configure_models(self) -> None:
        self.model = Model(self.config.case)
        if self.config.case.turns:
            self.critic = Critic()

    def init_weights(self) -> None:
        for model in self.named_models().values():
            fill(model)

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.config.case.optimizer, self.model)
        if self.config.case.turns:
            self.critic_optimizer = make_optimizer(self.config.case.optimizer, self.critic)
        self.losses: list[tuple[int, float]] = []
        self.norms: list[float] = []

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DistributedDataLoader(Tokens(self.config.case.n_samples), BATCH, drop_last=False), None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        count = (targets != -100).sum()
        weight = count if self.config.case.weighted else None
        if self.config.case.turns:
            self.backward(loss_of(self.critic(self.model(inputs).detach()), targets), weight=weight, model=self.critic)
            if not self.is_accumulating_gradients:
                self.norms.append(self.step(self.critic, self.critic_optimizer).item())
            with self.frozen(self.critic):
                loss = loss_of(self.critic(self.model(inputs)), targets)
        else:
            loss = loss_of(self.model(inputs), targets)
        self.backward(loss, weight=weight, model=self.model)
        self.losses.append((self.global_step, float(full(loss.detach()))))
        if not self.is_accumulating_gradients:
            self.norms.append(self.step(self.model, self.optimizer).item())
        return {"loss": loss}


class Sharded(Trained, dt.FSDPMixin):
    pass


def run_trainer(case: Case) -> dict[str, Any]:
    hsdp = {"dp_shard": 2, "dp_replicate": case.world_size // 2 or 1} if case.mode == "hsdp" else {}
    training = {"n_epochs": 2, "train_batch_size": BATCH, "sync_policy": case.sync_policy}
    trainer = (Sharded if case.mode in ("fsdp", "hsdp") else Trained)(case_config(case, "case", hsdp, training))
    trainer.fit()
    weights = whole_weights(trainer.named_models())
    result = {"weights": weights, "norms": trainer.norms, "losses": trainer.losses, "steps": trainer.global_step}
    trainer.close()
    return result


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    return [run_trainer(case) for case in cases]


def reference(case: Case) -> dict[str, Any]:
    """The same training by hand: one process, all micro-batches of all ranks, no framework."""
    models = {"model": Model(case)} | ({"critic": Critic()} if case.turns else {})
    for model in models.values():
        fill(model)
    optimizers = {name: make_optimizer(case.optimizer, model) for name, model in models.items()}
    data = Tokens(case.n_samples)
    norms, losses = [], []
    window = BATCH * case.world_size * case.accumulation
    for _ in range(2):
        for start in range(0, case.n_samples, window):
            rows = range(start, min(start + window, case.n_samples))
            parts = [
                (data.tokens[first : first + BATCH], data.labels[first : first + BATCH]) for first in rows[::BATCH]
            ]
            counts = [int((targets != -100).sum()) if case.weighted else 1 for _, targets in parts]
            shares = [count / sum(counts) for count in counts]
            found = []
            for first in range(0, len(parts), case.world_size):
                micro = list(zip(parts, shares, strict=True))[first : first + case.world_size]
                is_last = first + case.world_size >= len(parts)
                if case.turns:
                    for (inputs, targets), share in micro:
                        (loss_of(models["critic"](models["model"](inputs).detach()), targets) * share).backward()
                    if is_last:
                        norms.append(step_by_hand(case, models["critic"], optimizers["critic"]))
                    models["critic"].requires_grad_(False)
                for (inputs, targets), share in micro:
                    scores = models["model"](inputs)
                    loss = loss_of(models["critic"](scores) if case.turns else scores, targets)
                    (loss * share).backward()
                    found.append(loss.item())
                if case.turns:
                    models["critic"].requires_grad_(True)
            norms.append(step_by_hand(case, models["model"], optimizers["model"]))
            losses.append(found)
    return {"weights": whole_weights(models), "norms": norms, "losses": losses}


def step_by_hand(case: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Clips, steps and drops the gradients; returns their norm before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients))
    if case.clip is not None and norm > case.clip:
        for gradient in gradients:
            gradient *= case.clip / (norm + 1e-6)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def whole_weights(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Copies of all parameters; a collective where they are sharded."""
    return {
        f"{model_name}.{name}": full(p).detach().clone()
        for model_name, model in models.items()
        for name, p in model.named_parameters()
    }


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether both have the same names, and each tensor the same bits."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
