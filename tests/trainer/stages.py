"""A small model of blocks, trained by Dream Trainer as stages on several ranks, and by a loop written by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.arithmetic import Tokens, count, full, loss_of as mean_loss, step_by_hand
from tests.trainer.small import CaseConfig as Config, Noting, case_config, fit_each, weights

VOCABULARY, WIDTH, LENGTH, STEPS, BATCH, BLOCKS = 13, 8, 6, 4, 16, 5


@dataclass(frozen=True)
class Case:
    """What is trained, and on which mesh."""

    pp: int = 1
    dp: int = 1
    shard: int | str = 1
    schedule: str = "1F1B"
    microbatches: int | None = None
    accumulation: int = 1
    weighted: bool = True
    clip: float | None = 0.05
    recompute: str = "none"
    dropout: float = 0.0
    frozen: bool = False
    tied: bool = False
    compile: bool = False
    precision: str = "fp32"
    """Parameters are float64 in full precision, and float32 beside half."""
    changing: bool = False
    """Whether every second batch has shorter sequences."""

    @property
    def world_size(self) -> int:
        return self.pp * self.dp


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(case.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """As one writes it for a pipeline."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(case) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        if case.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((), 0.5))
        if case.frozen:
            self.embedding.requires_grad_(False)
            self.position.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
        if case.precision == "fp32":
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x)) * self.scale


class Rows(Tokens):
    vocabulary, row_length, seed = VOCABULARY, LENGTH, 3


def cropped(case: Case, step: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor[:, :4] if case.changing and step % 2 else tensor for tensor in tensors)


class Trained(Noting):
    def configure_models(self) -> None:
        self.model = Model(self.config.case)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        case = self.config.case
        return (
            DistributedDataLoader(Rows(BATCH * STEPS), BATCH // (case.dp * case.accumulation)),
            DistributedDataLoader(Rows(13), 3, drop_last=False),
        )

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self.initial = weights_of(self)

    def loss_fn(self) -> Any:
        return mean_loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = cropped(self.config.case, batch_idx, *batch)
        weight = count if self.config.case.weighted else None
        loss = self.forward_backward(self.model, (tokens,), labels, self.loss_fn(), weight=weight)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        tokens, labels = batch
        scores = self.model(tokens)
        loss = self.forward_backward(self.model, (tokens,), labels, mean_loss, weight=count)
        torch.testing.assert_close(loss, mean_loss(scores, labels), check_dtype=False, rtol=1e-12, atol=1e-12)
        return {"loss": loss}, count(labels)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0])


def config_of(
    case: Case, experiment: str = "case", *, saves: bool = False, callbacks: Sequence[dt.Callback] = (), **training: Any
) -> Config:
    pipeline = dt.PipelineParallelParameters(schedule=case.schedule, microbatches=case.microbatches)
    return case_config(
        case,
        experiment,
        {"dp_replicate": "auto" if isinstance(case.shard, int) else 1},
        {"train_batch_size": BATCH // (case.dp * case.accumulation), "num_sanity_val_steps": 0} | training,
        pipeline_parallel_parameters=pipeline,
        compile_parameters=dt.CompileParameters(backend="aot_eager"),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None, save_at_end=saves),
        callbacks=callbacks,
    )


def weights_of(trainer: Any) -> dict[str, Tensor]:
    """Whole copies of the weights that this rank's stage has."""
    return weights(trainer.model)


def state_of(trainer: Any) -> dict[str, Tensor]:
    """Whole copies of its weights and moments."""
    state = weights_of(trainer)
    for name, p in trainer.model.named_parameters():
        state |= {f"{key} of {name}": full(value).clone() for key, value in trainer.optimizer.state[p].items()}
    return state


def result_of(trainer: Any) -> dict[str, Any]:
    logged = [metrics for _, metrics in sorted(trainer.logged.items())]
    return {
        "losses": [metrics["train/loss"] for metrics in logged if "train/loss" in metrics],
        "val": logged[-1].get("val/loss") if logged else None,
        "norms": trainer.norms,
        "start": trainer.initial,
        "weights": weights_of(trainer),
        "state": state_of(trainer),
    }


def train(kind: type[Trained], cases: Sequence[Case], *args: Any, **training: Any) -> list[dict[str, Any]]:
    return fit_each((kind(config_of(case, *args, **training)) for case in cases), result_of)


def assert_trained(ranks: Sequence[dict[str, Any]], expected: dict[str, Any], case: Case) -> None:
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-10), case
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-10), case
    weights = {name: value for rank in ranks for name, value in rank["weights"].items()}
    for name, value in expected["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-10, msg=f"{case}: {name}")


def united(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All stages' tensors by name; equal where two ranks have one."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


def reference(case: Case, start: dict[str, Tensor]) -> dict[str, Any]:
    """The same training by hand from `start`: one process, the whole batch cut as the ranks and micro-batches do."""
    model = Model(case)
    model.load_state_dict(start, strict=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    data, parts = Rows(BATCH * STEPS), case.dp * case.accumulation * (case.microbatches or 2 * case.pp)
    losses, norms = [], []
    for first in range(0, len(data), BATCH):
        rows = slice(first, first + BATCH)
        tokens, labels = cropped(case, first // BATCH, data.tokens[rows], data.labels[rows])
        chunks = list(zip(tokens.chunk(parts), labels.chunk(parts), strict=True))
        weights = [count(b).double() if case.weighted else torch.ones(()).double() for _, b in chunks]
        loss = sum(mean_loss(model(a), b) * w for (a, b), w in zip(chunks, weights, strict=True)) / sum(weights)
        loss.backward()
        losses.append(loss.item())
        norms.append(step_by_hand(case, model, optimizer))
    rows = Rows(13)
    with torch.no_grad():
        predicted = model(rows.tokens)
        val = mean_loss(predicted, rows.labels)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "val": float(val), "predicted": predicted, "weights": weights}
