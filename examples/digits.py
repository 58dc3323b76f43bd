"""Handwritten digits of 8 x 8 pixels, which come with scikit-learn."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor

TRAINING = 1437  # to learn from; the other 360 are by other people


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] from 0 to 1, and labels."""
    found: Any = load_digits()
    return torch.tensor(found.images / 16, dtype=torch.float32)[:, None], torch.tensor(found.target)


def energy_distance(some: Tensor, others: Tensor) -> Tensor:
    """How far two sets of images are from having one distribution (Szekely and Rizzo 2013), for which it is 0."""
    some, others = some.flatten(1), others.flatten(1)
    return 2 * torch.cdist(some, others).mean() - torch.cdist(some, some).mean() - torch.cdist(others, others).mean()
