"""A small language model in the way of DeepSeek: each byte uses 2 of 8 experts and a shared one; a minute on one core.

    python examples/sparse_language.py
    torchrun --nproc-per-node=2 examples/sparse_language.py --device.expert-parallel 2

Ranks may also share its sequences (`--device.context-parallel 2`) or have some of its layers each
(`--device.pipeline-parallel 2`). The text is the source of Python's own standard library. Loads of the
experts are kept even by biases, without a loss for it, and at the end a picture shows the loss and how uneven each
layer is.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dream_trainer as dt
from dream_trainer import parse
from dream_trainer.modules import MoE, SharedExperts

WINDOW = 64
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(kw_only=True)
class SparseConfig(dt.DreamTrainerConfig):
    """A run of this example."""

    width: int = 64
    depth: int = 3
    n_experts: int = 8
    top_k: int = 2
    """Experts of each byte, beside the shared one."""
    balance_rate: float = 1e-2
    """How much the biases move per step; a run of thousands of steps takes 1e-3."""
    learning_rate: float = 3e-3


class Source(Dataset[Tensor]):
    """Windows of WINDOW + 1 bytes of the standard library's top modules; every 16th is held out."""

    def __init__(self, *, is_held_out: bool) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        windows = text[: len(text) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
        self.windows = windows[(torch.arange(len(windows)) % 16 == 0) == is_held_out]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index].long()


class Block(nn.Module):
    """Attention, then experts; the first block's feed-forward network is dense, as DeepSeek's are."""

    def __init__(self, config: SparseConfig, *, is_dense: bool) -> None:
        super().__init__()
        width = config.width
        self.norm, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_norm = nn.RMSNorm(width)
        self.feed: nn.Module = (
            SharedExperts(width, 4 * width)
            if is_dense
            else MoE(width, width, config.n_experts, config.top_k, n_shared=1, balance_rate=config.balance_rate)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.feed_norm(x))


class SparseLanguage(nn.Module):
    """Logits [batch, time, 256] of the next byte; of a pipeline's stages, what the next one takes."""

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, config.width), nn.Embedding(WINDOW, config.width)
        self.layers = nn.ModuleList(Block(config, is_dense=number == 0) for number in range(config.depth))
        self.norm, self.head = nn.RMSNorm(config.width), nn.Linear(config.width, 256)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.bytes is not None:
            x = self.bytes(x) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Of logits [batch, time, 256] and bytes [batch, time]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SparseTrainer(dt.DreamTrainer):
    """Next-byte prediction."""

    config: SparseConfig

    def configure_models(self) -> None:
        self.model = SparseLanguage(self.config)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        sizes = self.config.training_parameters
        train = DataLoader(Source(is_held_out=False), sizes.train_batch_size, shuffle=True, drop_last=True)
        return train, DataLoader(Source(is_held_out=True), sizes.val_batch_size)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate, fused=True)

    def cut_batch(self, batch: Tensor, cut: Callable[[Tensor], Tensor]) -> Batch:
        """Bytes, those that follow, and positions, of as much of each window as this rank has."""
        text, targets = batch[:, :-1], batch[:, 1:]
        positions = torch.arange(text.shape[1], device=text.device).expand_as(text)
        return cut(text), cut(targets), cut(positions)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: Batch, batch_idx: int) -> tuple[dict[str, Tensor], int]:
        return {"loss": self.loss(batch)}, batch[1].numel()

    def loss(self, batch: Batch) -> Tensor:
        """Mean nats per byte; in training its gradients too."""
        text, targets, positions = batch
        return self.forward_backward(self.model, (text, positions), targets, mean_loss, weight=Tensor.numel)

    def picture(self) -> Figure:
        """The loss, and the largest load over the mean of each layer."""
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name in ("train/loss", "val/loss"):
            left.plot(*zip(*self.history_of(name), strict=True), label=name)
        for number in range(1, self.config.depth):
            curve = self.history_of(f"experts/model.layers.{number}.feed/max_load")
            right.plot(*zip(*curve, strict=True), label=f"layer {number}")
        left.set(xlabel="step", ylabel="nats per byte")
        right.set(xlabel="step", ylabel="largest load over the mean")
        left.legend()
        right.legend()
        return figure


def default_config() -> SparseConfig:
    """What a run without arguments does."""
    return SparseConfig(
        project="examples",
        group="sparse_language",
        experiment="stdlib",
        training_parameters=dt.TrainingParameters(
            max_steps=300,
            train_batch_size=8,
            global_batch_size=32,
            val_batch_size=64,
            gradient_clip_norm=1.0,
            val_every_n_steps=100,
            val_steps_per_epoch=4,
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_steps=100),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl", "console")),
    )


def main() -> None:
    """Trains from the command line, then draws what came of it."""
    with SparseTrainer(parse(default_config())) as trainer:
        trainer.fit()
        if trainer.world.is_main:
            path = trainer.run_dir / "sparse.png"
            trainer.picture().savefig(path)
            print(f"picture: {path}")


if __name__ == "__main__":
    main()
