"""Handwritten digits, classified without a class of one's own: in a notebook, a script, or on several ranks.

    python examples/simple.py
    torchrun --nproc-per-node=2 examples/simple.py

Started again, it goes on where it was; it ends when three validations in a row are no better.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from dream_trainer import EarlyStopping, Trainer


def show(image: torch.Tensor) -> str:
    """An image of 8 x 8 as text."""
    return "\n".join("".join(" .:oO@"[int(value * 5)] * 2 for value in row) for row in image.view(8, 8).tolist())


def main() -> None:
    """Trains, evaluates the best, and shows what it gets wrong."""
    digits: Any = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, val = TensorDataset(images[:1280], labels[:1280]), TensorDataset(images[1280:], labels[1280:])

    with Trainer(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer="adamw",
        lr=3e-3,
        schedule="cosine",
        train=train,
        val=val,
        metrics=["accuracy"],
        batch_size=32,
        epochs=15,
        monitor="val/accuracy",
        callbacks=[EarlyStopping(patience=3)],
        name="examples/simple/simple",
    ) as trainer:
        trainer.fit()
        trainer.load_best()
        metrics, guesses = trainer.evaluate(), trainer.predict(val).argmax(1)
        if trainer.is_main:
            print(f"the best epoch's accuracy: {metrics['val/accuracy']:.4f}; one that it gets wrong:")
            wrong = int((guesses != labels[1280:]).nonzero()[0])
            print(f"{show(images[1280 + wrong])}\nit says {guesses[wrong]}, and it is {labels[1280 + wrong]}")


if __name__ == "__main__":
    main()
