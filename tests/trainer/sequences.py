"""A small model of sequences, trained by Dream Trainer on ranks that share them, and by a loop written by hand."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dream_trainer as dt
from tests.api import DistributedDataLoader, packed_attention, packed_attention_mask
from tests.trainer.arithmetic import fill, step_by_hand
from tests.trainer.meshes import count, mean_loss
from tests.trainer.small import CaseConfig as Config, Noting, case_config

VOCABULARY, WIDTH, HEAD, LENGTH, STEPS = 13, 16, 4, 16, 5


@dataclass(frozen=True)
class Case:
    """What is trained, and on which mesh."""

    cp: int = 1
    dp: int = 1
    tp: int = 1
    shard: int | str = 1
    attention: str = "gathered"
    packed: bool = False
    causal: bool = True
    accumulation: int = 1
    clip: float | None = 0.05
    recompute: str = "none"
    overlap: bool = False
    dropout: float = 0.0
    offload: bool = False
    backend: str | None = None
    """That compiles; None: nothing is compiled."""
    nested: bool = False
    """Whether attention is recomputed by the model itself."""

    @property
    def world_size(self) -> int:
        return self.cp * self.dp * self.tp


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.causal, self.nested = case.causal, case.nested
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(case.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.query, self.key, self.value))
        if self.nested:
            attended = checkpoint(self.attend, q, k, v, mask, use_reentrant=False)
        else:
            attended = self.attend(q, k, v, mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return self.dropout(x + F.gelu(self.mlp(x)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return packed_attention(q, k, v, mask)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(case) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Rows(torch.utils.data.Dataset):
    """Rows as `PackedRows` gives them, of two or three documents; labels lie mostly at the front."""

    def __init__(self, length: int, row_length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = []
        for number in range(length):
            tokens, labels = torch.randint(VOCABULARY, (2, row_length), generator=generator).unbind()
            documents = torch.zeros(row_length, dtype=torch.long)
            for cut in (3 + number % 5, 11 + number % 3):
                documents[cut:] += 1
            labels[5 + number * 3 % 11 :: 1 + number % 2] = -100
            self.rows.append({"tokens": tokens, "labels": labels, "documents": documents})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def rows_per_batch(case: Case) -> int:
    """Of one data-parallel rank, so that a step has as many in every case."""
    return 8 // (case.dp * case.accumulation)


def with_positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"positions": torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])}


def loss_of(model: nn.Module, case: Case, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean over labels, and their number."""
    mask = packed_attention_mask(batch["documents"], causal=case.causal) if case.packed else None
    scores = model(batch["tokens"], batch["positions"], mask)
    return mean_loss(scores, batch["labels"]), count(batch["labels"])


class Trained(Noting):
    def configure_models(self) -> None:
        self.model = Model(self.config.case)

    def init_weights(self) -> None:
        fill(self.model)

    def apply_tensor_parallel(self, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = dict.fromkeys(("query", "key", "value"), ColwiseParallel()) | {"out": RowwiseParallel()}
        for block in self.model.blocks:
            parallelize_module(block, mesh, plan)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return (
            DistributedDataLoader(Rows(8 * STEPS), rows_per_batch(self.config.case)),
            DistributedDataLoader(Rows(7), 2, drop_last=False),
        )

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def cut_batch(self, batch: dict[str, Tensor], cut: Any) -> dict[str, Tensor]:
        return {name: cut(tensor) for name, tensor in with_positions(batch).items()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        loss, count = loss_of(self.model, self.config.case, batch)
        self.backward(loss, weight=count)
        self.log("labels", count, reduce="sum")
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, count = loss_of(self.model, self.config.case, batch)
        return {"loss": loss}, count

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, self.config.case, batch)[0][None]


def config_of(case: Case, experiment: str = "case", **training: Any) -> Config:
    replicas = "auto" if isinstance(case.shard, int) else case.dp
    return case_config(
        case,
        experiment,
        {"dp_replicate": replicas, "compile": case.backend is not None},
        {"train_batch_size": rows_per_batch(case), "num_sanity_val_steps": 0} | training,
        compile_parameters=dt.CompileParameters(backend=case.backend or "inductor"),
        context_parallel_parameters=dt.ContextParallelParameters(attention=case.attention),
    )


def reference(case: Case) -> dict[str, Any]:
    """The same training by hand: one process, whole sequences, no framework."""
    model = Model(case)
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Rows(8 * STEPS)
    losses, norms, labels = [], [], []
    for first in range(0, len(data), 8):
        rows = data.rows[first : first + 8]
        batch = with_positions({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        loss, count = loss_of(model, case, batch)
        loss.backward()
        labels.append(count.item())
        losses.append(loss.item())
        norms.append(step_by_hand(case, model, optimizer))
    with torch.no_grad():
        seen = [
            loss_of(model, case, with_positions({name: x[None] for name, x in row.items()})) for row in Rows(7).rows
        ]
    loss = sum(loss * count for loss, count in seen) / sum(count for _, count in seen)
    return {
        "losses": losses,
        "norms": norms,
        "labels": labels,
        "metrics": {"val/loss": float(loss)},
        "predicted": [loss.item() for loss, _ in seen],
        "weights": {name: p.detach() for name, p in model.named_parameters()},
    }
