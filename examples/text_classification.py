"""Tells from ten lines of Python which package of the standard library they are from, with a small transformer.

    python examples/text_classification.py
    torchrun --nproc-per-node=2 examples/text_classification.py

The texts come with Python, and a batch is as long as its longest text. At the end a picture shows which packages are
taken for which. Loss and accuracy are those of the recipe, dream_trainer/recipes/classifier.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from packages import PACKAGES, VOCABULARY, pieces
from pictures import curves
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import dream_trainer as dt


@dataclass(kw_only=True)
class TextConfig(dt.recipes.ClassifierConfig):
    """A run of this example; the defaults take about half a minute on one CPU core."""

    dim: int = 64
    depth: int = 1


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


class TextClassifier(dt.recipes.Classifier):
    """One class for each package."""

    config: TextConfig

    def configure_models(self) -> None:
        self.model = Network(self.config.dim, self.config.depth)

    def datasets(self) -> tuple[Any, Any]:
        return pieces(held_out=False), pieces(held_out=True)

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        """Words [batch, longest], padded with 0, and labels [batch]."""
        words, labels = zip(*samples, strict=True)
        return pad_sequence(list(words), batch_first=True), torch.tensor(labels)


def main() -> None:
    """Trains from the command line, then shows what came of it."""
    config = TextConfig(
        project="examples",
        group="text_classification",
        experiment="packages",
        optimizer=dt.OptimizerParameters(lr=4e-3, weight_decay=0.1),
        schedule=dt.ScheduleParameters(name="cosine", warmup_steps=20),
        training_parameters=dt.TrainingParameters(
            n_epochs=3, global_batch_size=32, train_batch_size=16, val_every_n_steps=50, val_every_n_epochs=1
        ),
    )
    with TextClassifier.from_cli(config) as trainer:
        trainer.fit()
        guesses, labels = trainer.predict("val").argmax(1), torch.tensor([label for _, label in pieces(held_out=True)])
        if trainer.world.is_main:
            taken = torch.zeros(len(PACKAGES), len(PACKAGES))
            taken.index_put_((labels, guesses), torch.tensor(1.0), accumulate=True)
            accuracy, path = trainer.history_of("val/accuracy"), trainer.run_dir / "packages.png"
            largest = float(taken.sum(1).max() / taken.sum())
            figure, (table,) = curves({"accuracy": accuracy}, "on the ends of files", guess=largest, beside=[1])
            table.imshow((taken / taken.sum(1, keepdim=True)).numpy(), cmap="Blues", vmin=0, vmax=1)
            table.set(xlabel="guess", ylabel="package", yticks=range(len(PACKAGES)), yticklabels=PACKAGES)
            figure.savefig(path, dpi=90)
            print(f"held-out accuracy: {accuracy[-1][1]:.1%}; picture: {path}")


if __name__ == "__main__":
    main()
