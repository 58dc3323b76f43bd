"""The parity matrix of `tools/parity.sh`: the llama example on every mesh, against itself in one process.

Each cell trains the "tiny" Llama in float64 for ten steps on the same global batches, with losses weighted by unequal
numbers of tokens and gradients clipped. What may differ from one process is rounding. Each mesh of replicas, shards and
split layers trains in float32 as well, where the losses are compared. tests/examples runs some cells.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The example's modules import each other by plain name, as a script's folder allows.
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "llama"))

import torch
import torch.nn.functional as F
from model import Attention, Llama, LlamaConfig
from settings import LlamaTrainerConfig, default_config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from train import LlamaTrainer

import dream_trainer as dt
from dream_trainer.data import packed_attention, packed_attention_mask
from dream_trainer.modules import MoE
from dream_trainer.parallel.sharding import names_in_whole
from dream_trainer.trainer.step import gradients as step_gradients
from tests.trainer.arithmetic import full
from tests.worlds import run_world
from tools.parity_cells import Cell, all_cells

N_STEPS, SEQ_LEN = 10, 16
TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-5


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


def split_mixtures(model: Llama, mesh: DeviceMesh, *, in_time: bool) -> None:
    """Splits shared experts, and gives mixtures whole sequences as plain tensors; the example's plan gives DTensors."""
    stream = Shard(1) if in_time else Replicate()
    whole = PrepareModuleInputOutput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Replicate(),),
        use_local_input=True,
        output_layouts=(Replicate(),),
        desired_output_layouts=(stream,),
    )
    shared = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer.feed_forward.shared, mesh, shared)
        parallelize_module(layer, mesh, {"feed_forward": whole})


class PackedAttention(Attention):
    """Attention in rows of several documents."""

    def forward(self, x: Tensor, *, positions: Any) -> Tensor:
        places, documents = positions
        q, k, v = (self._heads(projection(x)) for projection in (self.wq, self.wk, self.wv))
        attended = packed_attention(self.rope(q, places), self.rope(k, places), v, packed_attention_mask(documents))
        return self.wo(attended.transpose(1, 2).flatten(2))


class PackedLlama(Llama):
    """Of which blocks get the documents with the positions, and so does a pipeline's next stage."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.attention = PackedAttention(config, self.rope)

    def forward(self, x: Tensor, documents: Tensor, positions: Tensor | None = None) -> Any:
        places = torch.arange(x.shape[1]) if positions is None else positions
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x, (places, documents))
        return (x, documents, places) if self.head is None else self.head(self.norm(x))


class PackedSparseLlama(PackedLlama, SparseLlama):
    """Both."""


@dataclasses.dataclass(kw_only=True)
class ParityConfig(LlamaTrainerConfig):
    """The example's, and what a cell changes of the model and the data."""

    odd_parts: bool = False
    experts: bool = False
    packed: bool = False
    weighted: bool = True


class ParityTrainer(LlamaTrainer):
    """The example as it is, but for padded samples, other models, and a record of what it does."""

    config: ParityConfig

    def configure_models(self) -> None:
        kinds = {(False, False): Llama, (True, False): PackedLlama, (False, True): SparseLlama}
        kind = kinds.get((self.config.packed, self.config.experts), PackedSparseLlama)
        model = (OddLlama if self.config.odd_parts else kind)(self.config.model)
        self.model = model.to(getattr(torch, self.config.dtype))

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Parallelize plan key")  # mixtures have other parts
            super().apply_tensor_parallel(mesh)
        if self.config.experts:
            split_mixtures(self.model, mesh, in_time=self.config.tensor_parallel_parameters.sequence_parallel)

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.start = weights(self)
        self.losses: list[tuple[int, float, int]] = []
        self.norms: list[float] = []

    def cut_batch(self, batch: Tensor, cut: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """As in the example, but a sample's first byte decides how much of it counts, and spaces end its documents."""
        tokens, positions = batch.long(), torch.arange(SEQ_LEN)
        labels = tokens[:, 1:]
        if self.config.weighted:
            labels = labels.masked_fill(positions > tokens[:, :1] % SEQ_LEN, -100)
        part = cut(tokens[:, :-1]), cut(labels), cut(positions, dim=0)
        return (*part, cut((tokens[:, :-1] == ord(" ")).cumsum(1))) if self.config.packed else part

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        tokens, targets, positions, *documents = batch
        places = (positions.expand_as(tokens),) if self.config.device_parameters.context_parallel > 1 else ()
        weight = self.n_labels if self.config.weighted else None
        return self.forward_backward(self.model, (tokens, *documents, *places), targets, self.mean_loss, weight=weight)

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean over the labels that count; zero where there is none."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / max(
            1, self.n_labels(targets)
        )

    def n_labels(self, targets: Tensor) -> int:
        """The number of labels that count."""
        return int((targets != -100).sum())

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.losses.append((self.global_step, float(full(loss.detach())), self.n_labels(batch[1])))
        norm = self.step(self.model, self.optimizer, self.scheduler)
        if norm is not None:
            self.norms.append(float(norm))
        return {}


def weights(trainer: LlamaTrainer) -> dict[str, Tensor]:
    """Whole copies of the parameters, by their names in the whole model."""
    whole = names_in_whole(trainer.model)
    named = trainer.model.named_parameters()
    return {whole[name][0] if name in whole else name: full(p.detach()).clone() for name, p in named}


def config_of(cell: Cell) -> ParityConfig:
    """The config of a cell: the example's, with nothing but fields changed."""
    config = default_config("tiny")
    as_example = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    changed = {
        "seq_len": SEQ_LEN,
        "dtype": cell.dtype,
        "schedule": dataclasses.replace(config.schedule, warmup_steps=1),
        "model": dataclasses.replace(config.model, tie_embeddings=cell.tied, n_layers=cell.layers),
        "device_parameters": cell.device_parameters,
        "fsdp_parameters": cell.fsdp_parameters,
        "pipeline_parallel_parameters": cell.pipeline_parameters,
        "context_parallel_parameters": dt.ContextParallelParameters(attention=cell.attention),
        "compile_parameters": dt.CompileParameters(backend=cell.backend or "inductor"),
        "tensor_parallel_parameters": dt.TensorParallelParameters(
            sequence_parallel=cell.sequence_parallel, loss_parallel=cell.loss_parallel
        ),
        "training_parameters": dt.TrainingParameters(
            max_steps=N_STEPS,
            train_batch_size=cell.batch,
            gradient_accumulation_steps=cell.accumulation,
            gradient_clip_norm=0.5,
            val_every_n_epochs=None,
        ),
        "checkpoint_parameters": dt.CheckpointParameters(save_every_n_epochs=None, save_at_end=False),
        "logger_parameters": dt.LoggerParameters(loggers=()),
        "callbacks": dt.CallbackCollection(),
    }
    what = {name: getattr(cell, name) for name in ("odd_parts", "experts", "packed", "weighted")}
    return ParityConfig(**as_example | changed | what)


def train_cells(cells: Sequence[Cell], directory: str) -> list[dict[str, Any]]:
    """Trains cells of one world size, one after the other, on this rank."""
    os.chdir(directory)
    # Both are right and change nothing: the record gathers weights in two steps, and split logits are a view.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    return [_train(cell) for cell in cells]


def _train(cell: Cell) -> dict[str, Any]:
    started = time.monotonic()
    step_gradients.BUCKET_BYTES = 2**12 if cell.overlap_reduce else 25 * 2**20
    with ParityTrainer(config_of(cell)) as trainer:
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
        kinds = sorted({cell.alone() for cell in cells})
        (references,) = run_world(train_cells, 1, kinds, directory, timeout=timeout)
        alone = dict(zip(kinds, references, strict=True))
        for world_size in sorted({cell.world_size for cell in cells}):
            chosen = [cell for cell in cells if cell.world_size == world_size]
            by_rank = run_world(train_cells, world_size, chosen, directory, timeout=timeout)
            for cell, ranks in zip(chosen, zip(*by_rank, strict=True), strict=True):
                found[cell] = compare(ranks, alone[cell.alone()]), ranks[0]["seconds"]
    return found


def mesh_table(found: dict[Cell, Miss]) -> str:
    """Markdown: a row for each mesh, with its largest differences in float64 and in float32."""
    head = ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "cells", "initial weights"]
    rows = []
    for mesh in sorted({cell.mesh for cell in found}, key=lambda mesh: (mesh[0], mesh[5], mesh[3], mesh)):
        rows.append([*mesh, *_worst({cell: miss for cell, miss in found.items() if cell.mesh == mesh})])
    return _markdown([*head, "off by", "float32, loss off by"], rows)


def option_table(found: dict[Cell, Miss]) -> str:
    """Markdown: a row for each value of each option."""
    rows = []
    for name in Cell._fields:
        if name not in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "layers"):
            for value in sorted({getattr(cell, name) for cell in found}, key=str):
                rows.append(
                    [name, value, *_worst({cell: miss for cell, miss in found.items() if getattr(cell, name) == value})]
                )
    return _markdown(["option", "value", "cells", "initial weights", "off by", "float32, loss off by"], rows)


def _worst(found: dict[Cell, Miss]) -> list[str]:
    exact = [max(miss[:3]) for cell, miss in found.items() if cell.dtype == "float64"]
    single = [miss.loss for cell, miss in found.items() if cell.dtype == "float32"]
    starts = "equal" if all(miss.starts_equal for miss in found.values()) else "DIFFER"
    return [str(len(found)), starts, *(f"{max(off):.0e}" if off else "" for off in (exact, single))]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def read_record(path: Path) -> dict[Cell, Miss]:
    """What earlier runs have found: a line for each cell."""
    lines = [ast.literal_eval(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Cell(*cell): Miss(*miss) for cell, miss in lines}


def main() -> int:
    """Trains what is asked for, and prints what was found; the number of cells that miss."""
    parser = argparse.ArgumentParser(
        description="Trains the llama example on every mesh, and compares with one process."
    )
    parser.add_argument("most", nargs="?", type=int, default=8, help="processes of a mesh, at most")
    parser.add_argument(
        "--axis", choices=("pp", "cp", "tp", "ep", "dp_shard", "dp_replicate"), help="only where it is above 1"
    )
    parser.add_argument("--part", default="1/1", help="of the cells: 2/5 is the second of five, about equally long")
    parser.add_argument("--record", type=Path, help="a file that keeps what is found: its cells are not trained again")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    chosen = [cell for cell in all_cells() if cell.world_size <= arguments.most]
    if arguments.axis is not None:
        chosen = [cell for cell in chosen if getattr(cell, arguments.axis) > 1]
    found = {} if arguments.record is None else read_record(arguments.record)
    left = [cell for cell in sorted(chosen, key=lambda cell: cell.world_size)[part - 1 :: parts] if cell not in found]
    started = time.monotonic()
    new: dict[Cell, Miss] = {}
    for cell in left:  # one by one: gloo's threads and connections stay until their process ends, and slow each step
        new[cell], _ = run_cells([cell])[cell]
        if arguments.record is not None:
            with arguments.record.open("a") as record:
                record.write(f"{(tuple(cell), tuple(new[cell]))!r}\n")
    found = {cell: miss for cell, miss in (found | new).items() if cell in chosen}
    print(mesh_table(found), option_table(found), sep="\n\n")
    seconds = time.monotonic() - started
    print(f"\n{len(found)} of {len(chosen)} cells, torch {torch.__version__}; {len(new)} of them now, {seconds:.0f} s.")
    print(f"Allowed are {TOLERANCE:.0e} in float64, and {FLOAT32_TOLERANCE:.0e} for the losses of float32.")
    missed = [cell for cell, miss in found.items() if not miss.is_parity(cell.dtype)]
    for cell in missed:
        print(f"MISSED {cell} {found[cell]}", file=sys.stderr)
    return len(missed)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
