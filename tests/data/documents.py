"""Documents in an order of their own, without a mixture; at module level, so that worker processes can import them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dream_trainer.data.sampler import ENDLESS, OrderedDataset

APART = 100_000
"""Token `t` of document `d` is `d * APART + t`: each says where it comes from."""


def document(number: int, length: int) -> NDArray[np.int64]:
    return number * APART + np.arange(length)


class NumberedDocuments(OrderedDataset):
    """Documents of given lengths in an order by the seed, once or for ever."""

    def __init__(self, lengths: Any, is_endless: bool = False) -> None:
        self.sizes = np.asarray(lengths, dtype=np.int64)
        self.is_endless = is_endless
        self.begin(0, None)

    def __len__(self) -> int:
        return ENDLESS if self.is_endless else len(self.sizes)

    def __getitem__(self, position: int) -> NDArray[np.int64]:
        number = self.number(position)
        return document(number, int(self.sizes[number]))

    def lengths(self, first: int, last: int) -> NDArray[np.int64]:
        return self.sizes[[self.number(position) for position in range(first, last)]]

    def number(self, position: int) -> int:
        return int(self.order[position % len(self.sizes)])

    def begin(self, seed: int, state: dict[str, Any] | None) -> None:
        self.seed = seed
        self.order = np.random.RandomState(seed).permutation(len(self.sizes))

    def state_at(self, position: int, mark: Any = None) -> dict[str, Any]:
        return {"seed": self.seed, "position": position}


def web_like_lengths(count: int, seed: int = 0) -> NDArray[np.int64]:
    """Lengths as texts have them: most are short, some are very long."""
    return np.maximum(np.random.RandomState(seed).lognormal(4.0, 1.0, count).astype(np.int64), 1)
