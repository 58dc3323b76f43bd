"""The part of each epoch that one data-parallel rank loads, as arithmetic. An epoch is cut into chunks of `batch_size *
dp_size` positions, whatever the accumulation; rank `r` takes the `r`-th slice of each. A last, smaller chunk is split
evenly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler

from dream_trainer.distributed.seeds import hash_seed

# (epoch, indices): one batch of one rank, and all that its samples' random draws depend on
BatchKey = tuple[int, list[int]]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How samples are dealt to ranks: `batch_size` per micro-batch to each of `dp_size` ranks, seen from `dp_rank`."""

    batch_size: int
    dp_rank: int
    dp_size: int

    @property
    def chunk_size(self) -> int:
        """Samples in one micro-batch of all ranks together."""
        return self.batch_size * self.dp_size

    def slice_of_chunk(self, size: int) -> tuple[int, int]:
        """Offset and length of this rank's part of a chunk of `size` samples; uneven, the first ranks take one more."""
        share, extra = divmod(size, self.dp_size)
        return self.dp_rank * share + min(self.dp_rank, extra), share + (self.dp_rank < extra)

    def samples_in(self, number: int, samples: int) -> int:
        return self.slice_of_chunk(min(self.chunk_size, samples - number * self.chunk_size))[1]


class RankBatchSampler(Sampler[BatchKey]):
    """Yields this rank's batches of one pass, each as (epoch, indices)."""

    def __init__(self, length: int, sharding: Sharding, *, seed: int, shuffle: bool) -> None:
        self.length = length
        self.sharding = sharding
        self.seed = seed
        self.shuffle = shuffle
        self._next_pass = (0, 0, length)

    def start(self, epoch: int, first: int, end: int) -> None:
        """Sets what the next iterator yields: positions `first` to `end` (exclusive) of `epoch`'s order."""
        self._next_pass = (epoch, first, end)

    def indices(self, epoch: int, first: int, end: int) -> list[list[int]]:
        """This rank's batches of those positions; does not change the next iterator."""
        return [indices for _, indices in self._batches(epoch, first, end)]

    def __iter__(self) -> Iterator[BatchKey]:
        # Not a generator itself: the pass is the one that is set now, not when the first batch is drawn.
        return self._batches(*self._next_pass)

    def _batches(self, epoch: int, first: int, end: int) -> Iterator[BatchKey]:
        sharding = self.sharding
        num_full, last_chunk = divmod(end - first, sharding.chunk_size)
        last = first + num_full * sharding.chunk_size
        offset, size = sharding.slice_of_chunk(last_chunk)
        if not self.shuffle:  # the order may be endless
            for chunk in range(first + sharding.dp_rank * sharding.batch_size, last, sharding.chunk_size):
                yield epoch, list(range(chunk, chunk + sharding.batch_size))
            if size:
                yield epoch, list(range(last + offset, last + offset + size))
            return
        order = epoch_order(self.seed, epoch, self.length, self.shuffle)
        full = order[first:last].view(num_full, sharding.dp_size, sharding.batch_size)[:, sharding.dp_rank]
        for block in range(0, num_full, 64):  # many at a time, since a tensor slice costs like a small batch
            for indices in full[block : block + 64].tolist():
                yield epoch, indices
        if size:
            yield epoch, order[last + offset : last + offset + size].tolist()

    def samples_in(self, number: int) -> int:
        _, first, end = self._next_pass
        return self.sharding.samples_in(number, end - first)

    def __len__(self) -> int:
        _, first, end = self._next_pass
        full, rest = divmod(end - first, self.sharding.chunk_size)
        return full + (self.sharding.slice_of_chunk(rest)[1] > 0)


# the epoch that validation samples are seeded with: the same augmentation each time, and none that training has
VALIDATION_EPOCH = -1


# Nothing of these depends on the world size, the workers or earlier draws, so any rank can compute any epoch's order.


def epoch_order(seed: int, epoch: int, length: int, shuffle: bool) -> Tensor:
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator(device="cpu")
    generator.manual_seed(hash_seed(b"order", seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


def sample_seed(seed: int, epoch: int, index: int) -> int:
    return hash_seed(b"sample", seed, epoch, index)
