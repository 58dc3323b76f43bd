"""Datasets and loaders of the data tests; at module level, so that worker processes can import them."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler


class DrawingDataset(Dataset[dict[str, Any]]):
    """Sample i is `first` + i and one draw of each global generator, as an augmentation would make it."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {
            "index": self.first + index,
            "torch": torch.rand((), dtype=torch.float64),
            "numpy": np.random.rand(),
            "python": random.random(),
        }


class CountingDataset(Dataset[int]):
    """Notes which samples were loaded (in this process)."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class ShuffledStream(IterableDataset[int]):
    """An iterable dataset with a shuffle buffer that draws from the global generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for index in range(self.length):
            buffer.append(index)
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4))
        yield from buffer


class KeepsNext:
    """Knows how far it is."""

    next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class LiveShuffle:
    """A shuffle buffer that hands its state out as it is, and draws each sample from a global generator."""

    def __init__(self, length: int, size: int, capacity: int) -> None:
        self.length, self.size, self.capacity = length, size, capacity
        self.buffer: list[int] = []
        self.next = 0
        self.was_loaded = False

    def __iter__(self) -> Iterator[Any]:
        if not self.was_loaded:
            self.buffer, self.next = [], 0
        self.was_loaded = False
        while self.buffer or self.next < self.length:
            batch = []
            while len(batch) < self.size and (self.buffer or self.next < self.length):
                while len(self.buffer) < self.capacity and self.next < self.length:
                    self.buffer.append(self.next)
                    self.next += 1
                batch.append(self.buffer.pop(random.randrange(len(self.buffer))))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer, self.next, self.was_loaded = state["buffer"], state["next"], True


class Order(Sampler[int]):
    """Somebody's sampler, which draws its order from a global generator when a pass begins."""

    def __init__(self, length: int, permutation: Callable[[int], Any] = torch.randperm) -> None:
        self.length, self.permutation = length, permutation

    def __iter__(self) -> Iterator[int]:
        yield from (int(index) for index in self.permutation(self.length))

    def __len__(self) -> int:
        return self.length


class BrokenDataset(Dataset[int]):
    """Fails at sample 5."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("sample 5 is damaged")
        return index


def rows(batch: dict[str, Tensor]) -> list[tuple[float, ...]]:
    """A batch of DrawingDataset as one tuple for each sample."""
    columns = [batch[name].tolist() for name in ("index", "torch", "numpy", "python")]
    return list(zip(*columns, strict=True))


def global_states() -> tuple[Any, ...]:
    """The global generators of this process, comparable with ==."""
    state, pythons = random.getstate(), random.Random()
    pythons.setstate(state)  # one stream has several states, so its next words are compared
    return (
        torch.get_rng_state().tolist(),
        (pythons.getrandbits(32 * 624), state[-1]),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    )
