"""Which sample comes when, and with which randomness: pure functions of the run's seed.

Nothing here depends on the world size, the number of workers or what was drawn before, so that any rank of any world
can compute any epoch's order, and resume in the middle of it, from three integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dream_trainer.distributed.seeds import hash_seed

VALIDATION_EPOCH = -1
"""The epoch that validation samples are seeded with: the same augmentation each time, and none that training has."""


def epoch_order(seed: int, epoch: int, length: int, shuffle: bool) -> Tensor:
    """The sample indices of one epoch in the order in which they are consumed.

    Args:
        seed: The run's seed.
        epoch: Number of the pass over the data.
        length: Number of samples in the dataset.
        shuffle: False gives 0, 1, ..., length - 1.

    Returns:
        Shape `(length,)`, int64, on the CPU.
    """
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator(device="cpu")
    generator.manual_seed(hash_seed(b"order", seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """The 64-bit seed of the random draws made while loading sample `index` in `epoch`."""
    return hash_seed(b"sample", seed, epoch, index)
