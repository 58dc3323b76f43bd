"""Which sample comes when, and with which randomness: pure functions of the run's seed.

Nothing here depends on the world size, the number of workers or what was drawn before, so that any rank of any world
can compute any epoch's order, and resume in the middle of it, from three integers.
"""

from __future__ import annotations

import struct

import torch
import xxhash
from torch import Tensor

VALIDATION_EPOCH = -1
"""The epoch that validation samples are seeded with: the same augmentation each time, and none that training has."""


def hash_seed(purpose: bytes, *numbers: int) -> int:
    """A 64-bit seed that is unrelated to that of any other purpose or numbers.

    Args:
        purpose: Keeps apart seeds of different uses with the same numbers.
        *numbers: Integers of any sign; only the lowest 64 bits of each count.
    """
    words = [number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers]
    return xxhash.xxh3_64_intdigest(purpose + struct.pack(f"<{len(words)}Q", *words))


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
