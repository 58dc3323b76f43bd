"""The model and the data of the examples beside this file, both before and after: neither has to change."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset


class Net(nn.Module):
    """Two hidden layers. Without dropout, whose draws would differ between two trainers."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 10] of images [batch, 8, 8]."""
        return self.head(self.layers(images.flatten(1)))


def digits(split: Literal["train", "val"]) -> TensorDataset:
    """scikit-learn's handwritten digits, shuffled once: 1024 images to train on, 773 to validate."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    chosen = order[:1024] if split == "train" else order[1024:]
    images = torch.tensor(found.images, dtype=torch.float32) / 16
    return TensorDataset(images[chosen], torch.tensor(found.target)[chosen])
