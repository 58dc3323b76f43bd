"""A small model trained by Dream Trainer on any mesh: in stages of shared layers, sequences and experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from tests.api import DistributedDataLoader, MoE, packed_attention, packed_attention_mask
from tests.trainer import stages
from tests.trainer.arithmetic import full
from tests.trainer.small import BY_BLOCKS, CaseConfig as Config, Noting, case_config, fit_each
from tests.trainer.stages import count, state_of, united, weights_of

VOCABULARY, WIDTH, HEAD, LENGTH, BATCH = 16, 16, 4, 8, 16


@dataclass(frozen=True)
class Case:
    """What is trained, and on which mesh."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    shard: int | str = 1
    plan: str = "sequence"
    """What ranks that share layers split: "layers", "sequence" too, or "dtensors" between them as well."""
    loss_parallel: bool = False
    attention: str = "gathered"
    ep: int = 1
    experts: bool = False
    """Whether the last block has a mixture."""
    uneven: bool = False
    """Whether half of the data-parallel ranks have shorter sequences in every second batch."""
    changing: bool = False
    """Whether every second batch of a window has shorter sequences."""
    seldom: bool = False
    """Whether the model is trained in the first batch of a window alone, and another one in the others."""
    short: bool = False
    """Whether labels are in the first half of each sequence alone, so that ranks have none in their parts."""
    packed: bool = False
    """Whether sequences are rows of several documents."""
    schedule: str = "1F1B"
    accumulation: int = 1
    clip: float | None = 0.05
    recompute: str = "none"
    dropout: float = 0.0
    precision: str = "fp32"
    """Parameters are float64 in full precision, and float32 beside half."""
    compile: bool = False
    poisoned: bool = False
    """Whether the loss of the second step is not a number."""
    blocks: int = 2
    steps: int = 10

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def alone(self) -> "Case":
        """The same training in one process."""
        assert not self.uneven  # which one process cannot do
        return Case(
            blocks=self.blocks,
            experts=self.experts,
            short=self.short,
            packed=self.packed,
            precision=self.precision,
            poisoned=self.poisoned,
            clip=self.clip,
            steps=self.steps,
            changing=self.changing,
            seldom=self.seldom,
            accumulation=self.accumulation if self.changing or self.seldom else 1,
        )


class Block(nn.Module):
    def __init__(self, case: Case, *, is_sparse: bool) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, WIDTH, 4, 2, n_shared=1, balance_rate=0.02) if is_sparse else None
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(case.dropout)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.query, self.key, self.value))
        if documents is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            attended = packed_attention(q, k, v, packed_attention_mask(documents))
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return x if self.moe is None else x + self.moe(x)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        sparse = [case.experts and place == case.blocks - 1 for place in range(case.blocks)]
        self.blocks = nn.ModuleList(Block(case, is_sparse=is_sparse) for is_sparse in sparse)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        if case.precision == "fp32":
            self.double()

    def forward(self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Any:
        if self.embedding is not None:
            x = self.embedding(x) + self.position(positions)
        for block in self.blocks:
            x = block(x, documents)
        if self.head is not None:
            return self.head(self.norm(x))
        return x if documents is None else (x, documents)


class Rows(stages.Rows):
    """With the documents of a packed row."""

    vocabulary, row_length = VOCABULARY, LENGTH

    def __init__(self, length: int, *, short: bool = False) -> None:
        super().__init__(length)
        if short:
            self.labels[:, LENGTH // 2 :] = -100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return *super().__getitem__(index), (torch.arange(LENGTH) > index % LENGTH).long()


def mean_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Over labels; 0 where there is none."""
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") / count(labels).clamp(min=1)


def poisoned_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return mean_loss(scores, labels) * float("nan")


def split(model: Model, mesh: Any, case: Case) -> None:
    """Splits layers, and by choice sequences between them; "dtensors" gives blocks DTensors and not rank's parts."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    is_local = case.plan != "dtensors"
    stream = Replicate() if case.plan == "layers" else Shard(1)
    rows = RowwiseParallel(output_layouts=stream, use_local_output=is_local)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=is_local)
    head = ColwiseParallel(
        input_layouts=stream,
        output_layouts=Shard(-1) if case.loss_parallel else Replicate(),
        use_local_output=not case.loss_parallel,
    )
    ends = {"embedding": embedding, "position": embedding, "head": head, "norm": SequenceParallel()}
    if case.plan == "layers":
        del ends["norm"]
    there = {name for name, _ in model.named_children()}
    parallelize_module(model, mesh, {name: style for name, style in ends.items() if name in there})
    columns = {name: ColwiseParallel(input_layouts=stream) for name in ("query", "key", "value", "up")}
    for block in model.blocks:
        norms = {} if case.plan == "layers" else {name: SequenceParallel() for name in ("norm", "mlp_norm")}
        parallelize_module(block, mesh, columns | norms | {"out": rows, "down": rows})


class Trained(Noting):
    loaded: dict[str, Tensor] | None = None

    def warn_once(self, key: str, message: str) -> None:
        self.said.append(key)
        super().warn_once(key, message)

    def configure_models(self) -> None:
        self.model = Model(self.config.case)
        if self.config.case.seldom:
            self.other = Model(self.config.case)
        self.said: list[str] = []

    def apply_tensor_parallel(self, mesh: Any) -> None:
        split(self.model, mesh, self.config.case)
        if self.config.case.seldom:
            split(self.other, mesh, self.config.case)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        case = self.config.case
        return (
            DistributedDataLoader(Rows(BATCH * case.steps, short=case.short), BATCH // (case.dp * case.accumulation)),
            DistributedDataLoader(Rows(7), 5, drop_last=False),
        )

    def configure_optimizers(self) -> None:
        is_fused = self.config.case.precision == "fp32"  # one operation on DTensors, whose placement takes long to find
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=is_fused)
        if self.config.case.seldom:
            self.other_optimizer = torch.optim.SGD(self.other.parameters(), lr=1e-2)
        self.initial = weights_of(self)

    def on_load(self, path: Any) -> None:
        self.loaded = state_of(self)

    def cut_batch(self, batch: tuple[Tensor, ...], cut: Any) -> tuple[Tensor, ...]:
        positions = torch.arange(LENGTH).expand_as(batch[0])
        return tuple(cut(tensor) for tensor in (*batch, positions))

    def loss(self, model: Model, batch: tuple[Tensor, ...]) -> Tensor:
        if self.config.case.uneven and self.training and self.world.dp_rank % 2 and self.global_step % 2:
            batch = tuple(tensor[:, : LENGTH // 2] for tensor in batch)
        if self.config.case.changing and self.training and not self.is_accumulating_gradients:
            batch = tuple(tensor[:, : LENGTH // 2] for tensor in batch)
        is_poisoned = self.config.case.poisoned and self.training and self.global_step == 1
        loss_fn = poisoned_loss if is_poisoned else mean_loss
        return self.forward_backward(model, self.inputs(batch), batch[1], loss_fn, weight=count)

    def inputs(self, batch: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        tokens, _, documents, positions = batch
        return tokens, documents if self.config.case.packed else None, positions

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Any]:
        is_others_turn = self.config.case.seldom and batch_idx % self.config.case.accumulation > 0
        loss = self.loss(self.other if is_others_turn else self.model, batch)
        if not self.is_accumulating_gradients:
            if self.config.case.seldom:
                self.norms.append(float(self.step(self.other, self.other_optimizer)))
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        loss, scores = self.loss(self.model, batch), full(self.model(*self.inputs(batch)))
        if self.config.case.precision == "fp32":
            torch.testing.assert_close(full(loss), mean_loss(scores, batch[1]), rtol=1e-12, atol=1e-12)
        return {"loss": loss}, count(batch[1])

    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return full(self.model(*self.inputs(batch)))


def config_of(case: Case, experiment: str = "case", **training: Any) -> Config:
    policy = {"on_nonfinite": "skip" if case.poisoned else "raise"}
    return case_config(
        case,
        experiment,
        {"dp_replicate": "auto" if isinstance(case.shard, int) else 1},
        {"train_batch_size": BATCH // (case.dp * case.accumulation), "num_sanity_val_steps": 0} | policy | training,
        compile_parameters=dt.CompileParameters(backend="aot_eager"),
        fsdp_parameters=BY_BLOCKS,
        tensor_parallel_parameters=dt.TensorParallelParameters(loss_parallel=case.loss_parallel),
        context_parallel_parameters=dt.ContextParallelParameters(attention=case.attention),
        pipeline_parallel_parameters=dt.PipelineParallelParameters(schedule=case.schedule),
    )


def train(case: Case) -> dict[str, Any]:
    with Trained(config_of(case)) as trainer:
        trainer.fit()
        return {
            "losses": [trainer.logged[step]["train/loss"] for step in range(1, case.steps + 1)],
            "norms": trainer.norms,
            "val": trainer.logged[case.steps]["val/loss"],
            "skipped": trainer.skipped_steps,
            "said": trainer.said,
            "scale": (scale := trainer._runtime.accumulation.loss_scale) and scale.state_dict(),
            "loads": {name: v for name, v in trainer.logged[case.steps].items() if "_load" in name},
            "biases": {n: b.clone() for n, b in trainer.model.named_buffers() if n.endswith("balance_bias")},
            "start": trainer.initial,
            "weights": weights_of(trainer),
            "predicted": trainer.predict(DistributedDataLoader(Rows(5), 3, drop_last=False)),
        }


def travel(hops: Sequence[tuple[Case, int]], experiment: str) -> list[dict[str, Any]]:
    """Trains up to each hop's step, in a trainer of its own that goes on from the last one's checkpoint."""
    saves = dt.CheckpointParameters(save_every_n_epochs=None)
    configs = (config_of(case, experiment, max_steps=max_steps) for case, max_steps in hops)
    return fit_each(
        (Trained(replace(config, checkpoint_parameters=saves)) for config in configs),
        lambda trainer: {"start": trainer.initial, "loaded": trainer.loaded, "state": state_of(trainer)},
    )


def assert_as_alone(case: Case, ranks: Sequence[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Checks that all that ranks found is what one process found: initial weights to the bit, the rest to rounding."""
    start, weights = united([rank["start"] for rank in ranks]), united([rank["weights"] for rank in ranks])
    assert start.keys() == alone["start"].keys()
    assert all(torch.equal(start[name], value) for name, value in alone["start"].items()), case
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-10, abs=1e-10, nan_ok=True), case
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-10, abs=1e-10, nan_ok=True), case
        assert rank["skipped"] == alone["skipped"]
        assert not [key for key in rank["said"] if "under context_parallel" in key], case
        assert len(rank["loads"]) == 2 * case.experts
        assert rank["loads"] == pytest.approx(alone["loads"])
        assert all(torch.equal(bias, alone["biases"][name]) for name, bias in rank["biases"].items())
        assert rank["val"] == pytest.approx(alone["val"], rel=1e-10), case
        torch.testing.assert_close(rank["predicted"], alone["predicted"], rtol=1e-10, atol=1e-10)
    for name, value in alone["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-10, msg=f"{case}: {name}")
