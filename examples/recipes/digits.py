"""The model and the data of classifier.yaml: handwritten digits, which come with scikit-learn."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def network(width: int) -> nn.Module:
    """Logits [batch, 10] of images [batch, 64]."""
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 digits to train on, and 360 by other people to validate."""
    found: Any = load_digits()
    images, labels = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
