"""A small language model in the way of DeepSeek: each byte uses 2 of 8 experts and a shared one; a minute on one core.

python examples/sparse_language.py
torchrun --nproc-per-node=2 examples/sparse_language.py --device.expert-parallel 2  # or context-, pipeline-parallel
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from byte_transformer import ByteTransformer
from pictures import curves, plot, save
from torch import Tensor
from torch.utils.data import DataLoader

import dream_trainer as dt
from dream_trainer.modules import MoE, SharedExperts

WINDOW = 64


@dataclass(kw_only=True)
class SparseConfig(dt.DreamTrainerConfig):
    """A run of this example."""

    width: int = 64
    depth: int = 3


def windows() -> tuple[Any, Any]:
    """WINDOW + 1 bytes each of the standard library's top modules: every 16th is held out, of which 256 validate."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    found = text.unfold(0, WINDOW + 1, WINDOW + 1).long()
    is_held_out = torch.arange(len(found)) % 16 == 0
    return found[~is_held_out], found[is_held_out][:256]


class SparseTrainer(dt.DreamTrainer):
    """Next-byte prediction; the first feed-forward network is dense, as DeepSeek's are."""

    config: SparseConfig

    def configure_models(self) -> None:
        width = self.config.width
        # Biases keep loads even, without a loss for it; they move by balance_rate, 1e-3 in runs of thousands of steps.
        mixtures = [MoE(width, width, 8, 2, n_shared=1, balance_rate=1e-2) for _ in range(self.config.depth - 1)]
        self.model = ByteTransformer(width, [SharedExperts(width, 4 * width), *mixtures], WINDOW)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        (train, val), sizes = windows(), self.config.training_parameters
        train_loader = DataLoader(train, self.micro_batch_size, shuffle=True, drop_last=True)
        return train_loader, DataLoader(val, sizes.val_batch_size)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)

    def cut_batch(self, batch: Tensor, cut: Any) -> tuple[Tensor, ...]:
        """Bytes, those that follow, and positions, of as much of each window as this rank has."""
        text, targets = batch[:, :-1], batch[:, 1:]
        positions = torch.arange(text.shape[1], device=text.device).expand_as(text)
        return cut(text), cut(targets), cut(positions)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> tuple[dict[str, Tensor], int]:
        return {"loss": self.loss(batch)}, batch[1].numel()

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean nats per byte; in training its gradients too."""
        text, targets, positions = batch
        return self.forward_backward(self.model, (text, positions), targets, self.mean_loss, weight=Tensor.numel)

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of logits [batch, time, 256] and bytes [batch, time]."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    sizes = dt.TrainingParameters(
        max_steps=300, train_batch_size=8, global_batch_size=32, gradient_clip_norm=1.0, val_every_n_steps=100
    )
    config = SparseConfig(project="examples", group="sparse_language", experiment="stdlib", training_parameters=sizes)
    with SparseTrainer.from_cli(config) as trainer:
        trainer.fit()
        if trainer.world.is_main:
            losses = {name: trainer.history_of(name) for name in ("train/loss", "val/loss")}
            figure, (right,) = curves(losses, "nats per byte", beside=[1])
            layers = range(1, trainer.config.depth)
            loads = {f"layer {n}": trainer.history_of(f"experts/model.layers.{n}.feed/max_load") for n in layers}
            plot(right, loads, "largest load over the mean")
            save(trainer, figure, "train/loss")
