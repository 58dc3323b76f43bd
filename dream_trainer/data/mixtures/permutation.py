"""A random order of any number of samples that is never written down: each place in it is computed by itself."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_HALF = np.uint64(32)


def scrambled(words: _Words) -> _Words:
    """64-bit words, each to one that is unrelated to it (splitmix64's finaliser)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class IndexPermutation:
    """Permutations of `range(length)`, one for each epoch, by arithmetic: no memory, and the same time for any index.

    A Feistel network permutes the fields of a rectangle that is hardly larger; what falls outside of `length` goes
    through it again, until it falls inside.

    Args:
        length: How many there are to order, from 1 to 2**62.
        seed: 64 bits.

    Example:
        ```python
        order = IndexPermutation(5, seed=0)
        assert sorted(order(np.arange(5), epochs=3)) == [0, 1, 2, 3, 4]
        ```
    """

    def __init__(self, length: int, seed: int) -> None:
        if not 1 <= length <= 2**62:
            raise ValueError(f"length={length} cannot be permuted. Give 1 to 2**62.")
        self.length = length
        self.seed = seed
        width = math.isqrt(length - 1) + 1
        self._width, self._height = np.uint64(width), np.uint64(-(-length // width))

    def __call__(self, indices: npt.ArrayLike, epochs: npt.ArrayLike = 0) -> Integers:
        places = np.asarray(indices, dtype=np.int64)
        epochs = np.broadcast_to(np.asarray(epochs, dtype=np.int64), places.shape)
        base = np.uint64(self.seed & 0xFFFF_FFFF_FFFF_FFFF)
        with np.errstate(over="ignore"):
            keys = scrambled(base + scrambled(epochs.reshape(-1).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
            found = self._network(places.reshape(-1).astype(np.uint64), keys)
            outside = np.flatnonzero(found >= np.uint64(self.length))
            while len(outside):
                again = self._network(found[outside], keys[outside])
                found[outside] = again
                outside = outside[again >= np.uint64(self.length)]
        return found.astype(np.int64).reshape(places.shape)

    def _network(self, words: _Words, keys: _Words) -> _Words:
        rows, columns = np.divmod(words, self._width)
        for number in range(0, _ROUNDS, 2):
            columns = (columns + (scrambled(rows + keys + np.uint64(number)) >> _HALF)) % self._width
            rows = (rows + (scrambled(columns + keys + np.uint64(number + 1)) >> _HALF)) % self._height
        return rows * self._width + columns
