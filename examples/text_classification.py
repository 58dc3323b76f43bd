"""Tells from ten lines of Python which package of the standard library they are from, with a small transformer.

    python examples/text_classification.py
    torchrun --nproc-per-node=2 examples/text_classification.py

The texts come with Python, a word's number is its checksum, and a batch is as long as its longest text. At the end a
picture shows which packages are taken for which.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import dream_trainer as dt
from dream_trainer import parse

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
VOCABULARY, LONGEST, LINES = 4096, 96, 10
Sample = tuple[Tensor, int]  # numbers of the words, uneven lengths; number of the package


@dataclass(kw_only=True)
class TextConfig(dt.DreamTrainerConfig):
    """A run of this example; the defaults take about half a minute on one CPU core."""

    dim: int = 64
    depth: int = 1
    learning_rate: float = 4e-3
    """Peak learning rate of AdamW; it then falls along a cosine."""


def texts(held_out: bool) -> list[Sample]:
    """Pieces of the packages' files: the last sixth of each file is held out, the rest is to train on."""
    root, samples = Path(os.__file__).parent, list[Sample]()
    for label, package in enumerate(PACKAGES):
        for path in sorted((root / package).rglob("*.py")):
            if {"test", "tests"} & set(path.relative_to(root).parts):
                continue  # not every Python comes with them
            lines = path.read_text(encoding="utf-8").splitlines()
            cut = len(lines) * 5 // 6
            lines = lines[cut:] if held_out else lines[:cut]
            for start in range(0, len(lines), LINES):
                words = re.findall(r"\w+|[^\w\s]", "\n".join(lines[start : start + LINES]))[:LONGEST]
                if len(words) >= LINES:
                    # 0 is for padding. The checksum is the same in each process, which hash() is not.
                    numbers = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
                    samples.append((torch.tensor(numbers), label))
    return samples


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Words [batch, longest], padded with 0, and labels [batch]."""
    labels = torch.tensor([label for _, label in samples])
    return pad_sequence([words for words, _ in samples], batch_first=True), labels


class Network(nn.Module):
    """Logits [batch, packages] from the mean of what a transformer makes of the words [batch, length], in any order."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, len(PACKAGES))

    def forward(self, words: Tensor) -> Tensor:
        is_padding = words == 0
        x = self.words(words)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=is_padding)
        x = x.masked_fill(is_padding[..., None], 0)
        return self.head(x.sum(1) / (~is_padding).sum(1, keepdim=True))


class TextClassifier(dt.DreamTrainer):
    """Cross entropy over the packages."""

    config: TextConfig

    def configure_models(self) -> None:
        self.model = Network(self.config.dim, self.config.depth)

    def configure_dataloaders(self) -> tuple[DataLoader, DataLoader]:
        sizes = self.config.training_parameters
        train: Any = texts(False)  # a list is a dataset; PyTorch's types know none
        held_out: Any = texts(True)
        return (
            DataLoader(train, sizes.train_batch_size, shuffle=True, drop_last=True, collate_fn=collate),
            DataLoader(held_out, sizes.val_batch_size, collate_fn=collate),
        )

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate, weight_decay=0.1)

    def configure_schedulers(self) -> None:
        cosine = dt.ScheduleParameters(name="cosine", warmup_steps=20)
        self.scheduler = dt.build_schedule(cosine, self.optimizer, total_steps=self.total_steps)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        words, labels = batch
        loss = F.cross_entropy(self.model(words), labels)
        self.backward(loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        words, labels = batch
        logits = self.model(words)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        words, labels = batch
        return torch.stack([labels, self.model(words).argmax(1)], dim=1)


def picture(trainer: TextClassifier, labels_and_guesses: Tensor) -> Figure:
    """Accuracy over the steps, and the shares of guesses for each package."""
    found = torch.zeros(len(PACKAGES), len(PACKAGES))
    found.index_put_(tuple(labels_and_guesses.T), torch.tensor(1.0), accumulate=True)
    largest = float(found.sum(1).max() / found.sum())
    figure = Figure(figsize=(10, 4), layout="constrained")
    curve, table = figure.subplots(1, 2)
    curve.plot(*zip(*trainer.history_of("val/accuracy"), strict=True))
    curve.axhline(largest, color="grey", linestyle=":", label="always the largest package")
    curve.set(xlabel="optimizer step", ylabel="accuracy on the ends of files", ylim=(0, 1))
    curve.legend()
    shares = table.imshow((found / found.sum(1, keepdim=True)).numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shares, label="share of the package's texts")
    table.set(xlabel="guess", ylabel="package")
    table.set_xticks(range(len(PACKAGES)), PACKAGES, rotation=45, ha="right")
    table.set_yticks(range(len(PACKAGES)), PACKAGES)
    return figure


def main() -> None:
    """Trains from the command line, then shows what came of it."""
    config = TextConfig(
        project="examples",
        group="text_classification",
        experiment="packages",
        training_parameters=dt.TrainingParameters(
            n_epochs=3,
            global_batch_size=32,
            train_batch_size=16,
            val_batch_size=64,
            val_every_n_steps=50,
            val_every_n_epochs=1,
        ),
    )
    with TextClassifier(parse(config)) as trainer:
        trainer.fit()
        labels_and_guesses = trainer.predict("val")
        if trainer.world.is_main:
            path = trainer.run_dir / "packages.png"
            picture(trainer, labels_and_guesses).savefig(path, dpi=90, bbox_inches="tight")
            print(f"held-out accuracy: {trainer.history_of('val/accuracy')[-1][1]:.1%}; picture: {path}")


if __name__ == "__main__":
    main()
