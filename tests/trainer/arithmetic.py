"""One small language-like model, trained by Dream Trainer and by a loop written by hand, to compare the two."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.small import CaseConfig, case_config, fill, full, train_by_hand, weights

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
    frozen: bool = False
    """Whether the first block is not trained."""
    recompute: str = "none"
    tp: int = 1
    """Ranks that share data and layers; `world_size` counts those that see different data."""
    plan: str = "sequence"
    loss_parallel: bool = False

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


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def count(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


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

    def init_weights(self) -> None:
        fill(self.model)

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.config.case.optimizer, self.model)
        self.losses: list[tuple[int, float]] = []
        self.norms: list[float] = []

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DistributedDataLoader(Tokens(self.config.case.n_samples), BATCH, drop_last=False), None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        loss = loss_of(self.model(batch[0]), batch[1])
        self.backward(loss, weight=count(batch[1]) if self.config.case.weighted else None)
        self.losses.append((self.global_step, float(full(loss.detach()))))
        if not self.is_accumulating_gradients:
            self.norms.append(self.step(self.model, self.optimizer).item())
        return {"loss": loss}


class Sharded(Trained, dt.FSDPMixin):
    pass


def config_of(case: Case, **training: Any) -> CaseConfig:
    shards = {"fsdp": case.world_size, "hsdp": 2}.get(case.mode, 1)
    return case_config(
        case,
        "case",
        {"dp_shard": shards, "dp_replicate": case.world_size // shards},
        {"n_epochs": 2, "train_batch_size": BATCH, "sync_policy": case.sync_policy} | training,
        tensor_parallel_parameters=dt.TensorParallelParameters(
            sequence_parallel=case.plan == "sequence", loss_parallel=case.loss_parallel
        ),
    )


def run_trainer(
    case: Case, kind: type[Trained] | None = None, look: Callable[[Any], dict[str, Any]] = lambda trainer: {}
) -> dict[str, Any]:
    """What is compared with the loop by hand, and what `look` finds in the trainer."""
    kind = kind or (Sharded if case.mode in ("fsdp", "hsdp") else Trained)
    with kind(config_of(case)) as trainer:
        trainer.fit()
        found = {"weights": weights(trainer.model), "norms": trainer.norms, "losses": trainer.losses}
        return found | {"steps": trainer.global_step} | look(trainer)


def reference(case: Case) -> dict[str, Any]:
    """The same training by hand: one process, all micro-batches of all ranks, no framework."""
    model, data = Model(case), Tokens(case.n_samples)
    fill(model)
    losses: list[float] = []

    def noted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(model(batch[0]), batch[1])
        losses.append(loss.item())
        return loss

    parts = list(zip(data.tokens.split(BATCH), data.labels.split(BATCH), strict=True))
    size = case.world_size * case.accumulation
    windows = 2 * [parts[first : first + size] for first in range(0, len(parts), size)]
    norms = train_by_hand(
        model,
        make_optimizer(case.optimizer, model),
        windows,
        noted_loss,
        weight_of=lambda batch: int(count(batch[1])) if case.weighted else 1,
        clip=case.clip,
    )
    each = iter(losses)
    return {"weights": weights(model), "norms": norms, "losses": [[next(each) for _ in window] for window in windows]}


def assert_as_by_hand(case: Case, ranks: Sequence[dict[str, Any]], tolerance: float = 1e-10) -> None:
    """Compares what ranks found with the loop by hand; losses are of all that see different data."""
    expected = reference(case)
    for result in ranks:
        assert result["steps"] == len(expected["losses"]), case
        assert result["norms"] == pytest.approx(expected["norms"], rel=tolerance, abs=tolerance), case
        torch.testing.assert_close(
            result["weights"], expected["weights"], rtol=tolerance, atol=tolerance, msg=f"{case}: {{}}".format
        )
    by_step = defaultdict(list)
    for micro in zip(*(result["losses"] for result in ranks[:: case.tp]), strict=True):
        for step, loss in micro:
            by_step[step].append(loss)
    for step, losses in enumerate(expected["losses"]):
        assert by_step[step] == pytest.approx(losses, rel=tolerance, abs=tolerance), (case, step)


def step_by_hand(case: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Clips, steps and drops the gradients; returns their norm before."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip or torch.inf)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether both have the same names, and each tensor the same bits."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
