"""The parity matrix of `tools/parity.sh`: the llama example on every mesh, against itself in one process.

Each cell trains the "tiny" Llama in float64 for ten steps on the same global batches, with losses weighted by unequal
numbers of tokens and gradients clipped. What may differ from one process is rounding. Each mesh trains in float32 as
well, where the losses are compared. tests/examples runs some cells.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

# The example's modules import each other by plain name, as a script's folder allows.
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "llama"))

import torch
import torch.nn.functional as F
from model import Llama, LlamaConfig
from torch import Tensor, nn
from train import DTYPES, Batch, LlamaTrainer, LlamaTrainerConfig, default_config

import dream_trainer as dt
from dream_trainer.modules import MoE
from dream_trainer.trainer.step import buckets
from tests.trainer.arithmetic import full
from tests.worlds import run_world

N_STEPS, GLOBAL_BATCH, SEQ_LEN = 10, 16, 16
TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-5
Recompute = Literal["none", "full", "selective"]


class Cell(NamedTuple):
    """One way to train the same thing."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    accumulation: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    loss_parallel: bool = False
    overlap_reduce: bool = False
    """Whether gradients leave within backward, in buckets so small that there are many."""
    backend: str | None = None
    """What compiles its blocks; None: nothing."""
    cp: int = 1
    attention: Literal["gathered", "ulysses"] = "gathered"
    """How ranks that share sequences see each other's positions."""
    ep: int = 1
    """Ranks that share the experts of each mixture."""
    pp: int = 1
    schedule: Literal["1F1B", "GPipe"] = "1F1B"
    """In which order micro-batches go through the stages of a pipeline."""
    tied: bool = False
    dtype: Literal["float32", "float64"] = "float64"
    odd_parts: bool = False
    """Whether the model is `OddLlama`."""
    experts: bool = False
    """Whether it is `SparseLlama`."""

    @property
    def world_size(self) -> int:
        """Processes it needs."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp


class Miss(NamedTuple):
    """How far a cell is from the single process, at most over steps and parameters."""

    loss: float
    norm: float
    weight: float
    starts_equal: bool
    """Whether the initial weights are the same bits."""

    def is_parity(self, dtype: str = "float64") -> bool:
        """Whether only rounding differs: in float32 of the losses, which it moves by more."""
        if dtype == "float32":
            return self.starts_equal and self.loss <= FLOAT32_TOLERANCE
        return self.starts_equal and max(self.loss, self.norm, self.weight) <= TOLERANCE


def all_cells() -> list[Cell]:
    """Every mesh of up to 8 processes, with and without accumulation and recomputing; then other plans and ties."""
    sizes = (1, 2, 4, 8)
    meshes = sorted((mesh for mesh in itertools.product(sizes, repeat=3) if math.prod(mesh) in sizes), key=math.prod)
    cells = [
        Cell(*mesh, accumulation, recompute)
        for mesh in meshes
        for accumulation in (1, 2)
        for recompute in ("none", "full")
    ]
    for mesh in ((1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2)):
        cells += [
            Cell(*mesh, 2, "selective", loss_parallel=True),
            Cell(*mesh, 2, "none", sequence_parallel=False),
            Cell(*mesh, 2, "full", sequence_parallel=False, loss_parallel=True, tied=True),
            Cell(*mesh, 1, "none", loss_parallel=True, tied=True),
            Cell(*mesh, 2, "selective", backend="aot_eager"),
            Cell(*mesh, 1, "none", loss_parallel=True, tied=True, backend="inductor"),
        ]
    for cp, mesh in ((cp, mesh) for cp in sizes[1:] for mesh in meshes if cp * math.prod(mesh) in sizes):
        cells += [
            Cell(*mesh, 2, cp=cp),
            Cell(*mesh, 1, "selective", cp=cp, tied=True),
            Cell(*mesh, 2, "full", cp=cp, attention="ulysses"),
        ]
    for ep, mesh in ((ep, mesh) for ep in sizes for mesh in meshes if mesh[2] == 1):
        data, cp = mesh[1] if mesh[1] > 1 else mesh[0], 2 if math.prod(mesh) == 4 else 1
        if data % ep == 0:
            cells += [Cell(*mesh, 2, how, ep=ep, experts=True) for how in ("none", "full")]
            cells += [Cell(*mesh, 1, "selective", cp=cp, ep=ep, tied=True, experts=True)]
    for mesh in [mesh for mesh in meshes if mesh[2] == 1 and 2 * math.prod(mesh) in sizes]:
        cells += [Cell(*mesh, 2, pp=2), Cell(*mesh, 1, "full", pp=2, schedule="GPipe")]
    cells += [Cell(*mesh, 2, dtype="float32") for mesh in meshes]
    cells += [Cell(*mesh, 2, how, odd_parts=True) for mesh in meshes for how in ("full", "selective")]
    replicas = [mesh for mesh in meshes if mesh[0] > 1 and mesh[1:] == (1, 1)]
    cells += [Cell(*mesh, 2, how, overlap_reduce=True, odd_parts=True) for mesh in replicas for how in ("none", "full")]
    return [*cells, Cell(tied=True), Cell(1, 2, 1, 2, "selective", tied=True)]


class OddLlama(Llama):
    """A frozen embedding and first layer, a parameter without a dimension, and one that few samples use."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.opening = nn.Parameter(torch.empty(config.vocab_size))
        for part in (self.embed, self.layers[0]):
            part.requires_grad_(False)

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.constant_(self.logit_scale, 0.5)
        nn.init.zeros_(self.opening)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens, positions) * self.logit_scale.exp()
        opens = tokens[:, 0] % 8 == 0
        return logits + opens[:, None, None] * self.opening if opens.any() else logits


class SparseLlama(Llama):
    """Mixtures of experts in place of the feed-forward networks."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.feed_forward = MoE(config.dim, config.hidden_dim // 2, 8, 2, n_shared=1, balance_rate=0.01)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)


class ParityTrainer(LlamaTrainer):
    """The example as it is, but for padded samples, and a record of what it does."""

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.start = weights(self)
        self.losses: list[tuple[int, float, int]] = []
        self.norms: list[float] = []

    def cut_batch(self, batch: Tensor, cut: Callable[..., Tensor]) -> Batch:
        """As in the example, but a sample's first byte decides how much of it counts."""
        tokens, positions = batch.long(), torch.arange(SEQ_LEN)
        is_padding = positions > tokens[:, :1] % SEQ_LEN
        return cut(tokens[:, :-1]), cut(tokens[:, 1:].masked_fill(is_padding, -100)), cut(positions, dim=0)

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean over the labels that count; zero where there is none."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / max(
            1, self.n_labels(targets)
        )

    def n_labels(self, targets: Tensor) -> int:
        """The number of labels that count."""
        return int((targets != -100).sum())

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.losses.append((self.global_step, float(full(loss.detach())), self.n_labels(batch[1])))
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer, self.scheduler)))
        return {}


class OddTrainer(ParityTrainer):
    """The same with an `OddLlama`."""

    def configure_models(self) -> None:
        self.model = OddLlama(self.config.model).to(DTYPES[self.config.dtype])

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.optimizer.add_param_group({"params": [self.model.logit_scale], "weight_decay": 0.0})


class SparseTrainer(ParityTrainer):
    """The same with a `SparseLlama`."""

    def configure_models(self) -> None:
        self.model = SparseLlama(self.config.model).to(DTYPES[self.config.dtype])


def weights(trainer: LlamaTrainer) -> dict[str, Tensor]:
    """Whole copies of the parameters."""
    return {name: full(p.detach()).clone() for name, p in trainer.model.named_parameters()}


def config_of(cell: Cell) -> LlamaTrainerConfig:
    """The config of a cell: the example's, with nothing but fields changed."""
    config = default_config("tiny")
    return dataclasses.replace(
        config,
        seq_len=SEQ_LEN,
        dtype=cell.dtype,
        warmup_steps=2,
        model=dataclasses.replace(config.model, tie_embeddings=cell.tied),
        device_parameters=dt.DeviceParameters(
            device="cpu",
            dp_replicate=cell.dp_replicate,
            dp_shard=cell.dp_shard,
            pipeline_parallel=cell.pp,
            context_parallel=cell.cp,
            expert_parallel=cell.ep,
            tensor_parallel=cell.tp,
            activation_checkpointing=cell.recompute,
            overlap_reduce=cell.overlap_reduce,
            compile=cell.backend is not None,
        ),
        context_parallel_parameters=dt.ContextParallelParameters(attention=cell.attention),
        pipeline_parallel_parameters=dt.PipelineParallelParameters(schedule=cell.schedule),
        compile_parameters=dt.CompileParameters(backend=cell.backend or "inductor"),
        tensor_parallel_parameters=dt.TensorParallelParameters(
            sequence_parallel=cell.sequence_parallel, loss_parallel=cell.loss_parallel
        ),
        training_parameters=dt.TrainingParameters(
            max_steps=N_STEPS,
            train_batch_size=GLOBAL_BATCH // (cell.dp_replicate * cell.dp_shard * cell.accumulation),
            gradient_accumulation_steps=cell.accumulation,
            gradient_clip_val=0.5,
            val_every_n_epochs=None,
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None, save_at_end=False),
        logger_parameters=dt.LoggerParameters(loggers=()),
        callbacks=dt.CallbackCollection(),
    )


def train_cells(cells: Sequence[Cell], directory: str) -> list[dict[str, Any]]:
    """Trains cells of one world size, one after the other, on this rank."""
    os.chdir(directory)
    # Both are right and change nothing: the record gathers weights in two steps, and split logits are a view.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    return [_train(cell) for cell in cells]


def _train(cell: Cell) -> dict[str, Any]:
    started = time.monotonic()
    buckets.BUCKET_BYTES = 2**12 if cell.overlap_reduce else 25 * 2**20
    kind = SparseTrainer if cell.experts else OddTrainer if cell.odd_parts else ParityTrainer
    with kind(config_of(cell)) as trainer:
        trainer.fit()
        found = {
            "start": trainer.start,
            "losses": trainer.losses,
            "norms": trainer.norms,
            "weights": weights(trainer),
            "seconds": time.monotonic() - started,
        }
    return found


def step_losses(ranks: Sequence[dict[str, Any]]) -> list[float]:
    """Mean loss per token of each step, over all micro-batches of all ranks.

    Ranks that share a layer's work report the same numbers, and leave the mean as it is.
    """
    sums: dict[int, list[float]] = {}
    for rank in ranks:
        for step, loss, n_tokens in rank["losses"]:
            total = sums.setdefault(step, [0.0, 0])
            total[0] += loss * n_tokens
            total[1] += n_tokens
    return [total / count for _, (total, count) in sorted(sums.items())]


def compare(ranks: Sequence[dict[str, Any]], alone: dict[str, Any]) -> Miss:
    """Distance of a cell, as its ranks report it, from the single process."""
    return Miss(
        loss=max(abs(a - b) for a, b in zip(step_losses(ranks), step_losses([alone]), strict=True)),
        norm=max(abs(a - b) for rank in ranks for a, b in zip(rank["norms"], alone["norms"], strict=True)),
        weight=max(
            float((weight - alone["weights"][name]).abs().max())
            for rank in ranks
            for name, weight in rank["weights"].items()
        ),
        # Of a pipeline each rank has some.
        starts_equal=all(
            {name for rank in ranks for name in rank[kind]} == alone[kind].keys() for kind in ("start", "weights")
        )
        and all(torch.equal(weight, alone["start"][name]) for rank in ranks for name, weight in rank["start"].items()),
    )


def run_cells(cells: Sequence[Cell], timeout: float = 1800.0) -> dict[Cell, tuple[Miss, float]]:
    """Trains `cells` and what they are compared with, a world of processes for each world size.

    Returns:
        By cell: its distance from the single process, and its seconds.
    """
    found: dict[Cell, tuple[Miss, float]] = {}
    with tempfile.TemporaryDirectory(prefix="parity-") as directory:
        kinds = sorted({cell[-4:] for cell in cells})
        single = [Cell(**dict(zip(Cell._fields[-4:], kind, strict=True))) for kind in kinds]
        (references,) = run_world(train_cells, 1, single, directory, timeout=timeout)
        alone = dict(zip(kinds, references, strict=True))
        for world_size in sorted({cell.world_size for cell in cells}):
            chosen = [cell for cell in cells if cell.world_size == world_size]
            by_rank = run_world(train_cells, world_size, chosen, directory, timeout=timeout)
            for cell, ranks in zip(chosen, zip(*by_rank, strict=True), strict=True):
                found[cell] = compare(ranks, alone[cell[-4:]]), ranks[0]["seconds"]
    return found


def plan_of(cell: Cell) -> str:
    """What is split beside the layers, in words, and what compiles them."""
    parts = ["sequence"] * cell.sequence_parallel + ["loss"] * cell.loss_parallel
    unsplit = "within backward" if cell.overlap_reduce else "-"
    split = unsplit if cell.tp == 1 else " + ".join(parts) or "nothing"
    if cell.pp > 1:
        split = f"{split}, layers in {cell.pp} stages ({cell.schedule})"
    if cell.cp > 1:
        split = f"{split}, positions over {cell.cp} ({cell.attention})"
    if cell.experts:
        split = f"{split}, experts over {cell.ep}"
    return split if cell.backend is None else f"{split}, compiled ({cell.backend})"


def mesh_table(found: dict[Cell, tuple[Miss, float]]) -> str:
    """Markdown: a row for each mesh, and the largest difference for each number of micro-batches in a step."""
    ways: list[tuple[int, Recompute]] = [(1, "none"), (1, "full"), (2, "none"), (2, "full")]
    rows = []
    for mesh in dict.fromkeys(cell[:3] for cell in found):
        misses = [found[cell][0] for way in ways if (cell := Cell(*mesh, *way)) in found]
        if len(misses) == len(ways):
            single = found[Cell(*mesh, 2, dtype="float32")][0]
            off = [*(f"{max(miss[:3]):.0e}" for miss in misses), f"{single.loss:.0e}"]
            rows.append([*mesh, _starts(*misses, single), *off])
    off = ["1 micro-batch", "1, recomputed", "2 micro-batches", "2, recomputed", "float32, loss"]
    return _markdown(["dp_replicate", "dp_shard", "tp", "initial weights", *off], rows)


def option_table(found: dict[Cell, tuple[Miss, float]]) -> str:
    """Markdown: the cells with another plan than the usual, selective recomputing, tied weights, or odd parts."""
    rows = [
        [*cell[:5], plan_of(cell), *map(_yes, (cell.tied, cell.odd_parts)), _starts(miss), f"{max(miss[:3]):.0e}"]
        for cell, (miss, _) in found.items()
        if cell.dtype == "float64" and (cell != Cell(*cell[:5]) or cell.recompute == "selective")
    ]
    head = "dp_replicate, dp_shard, tp, micro-batches, recomputed, also split, tied, odd parts, initial weights, off by"
    return _markdown(head.split(", "), rows)


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _starts(*misses: Miss) -> str:
    return "equal" if all(miss.starts_equal for miss in misses) else "DIFFER"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main(max_world: int) -> int:
    """Prints the matrix up to `max_world` processes; the number of cells that miss."""
    started = time.monotonic()
    found = run_cells([cell for cell in all_cells() if cell.world_size <= max_world])
    missed = [cell for cell, (miss, _) in found.items() if not miss.is_parity(cell.dtype)]
    exact = [miss[:3] for cell, (miss, _) in found.items() if cell.dtype == "float64"]
    worst = Miss(*(max(values) for values in zip(*exact, strict=True)), True)
    print(mesh_table(found), option_table(found), sep="\n\n")
    print(f"\n{len(found)} cells, torch {torch.__version__}, {time.monotonic() - started:.0f} s.")
    print(
        f"At most {worst.loss:.1e} (loss), {worst.norm:.1e} (norm), {worst.weight:.1e} (weights) from one process "
        f"in float64; {TOLERANCE:.0e} is allowed, and {FLOAT32_TOLERANCE:.0e} for the losses of float32."
    )
    for cell in missed:
        print(f"MISSED {cell}", file=sys.stderr)
    return len(missed)


if __name__ == "__main__":
    sys.exit(1 if main(int(sys.argv[1]) if len(sys.argv) > 1 else 8) else 0)
