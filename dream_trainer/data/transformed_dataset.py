"""The transforms of streams over a dataset whose samples are reached by number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from dream_trainer.data.transforms import (
    Batch,
    Filter,
    Map,
    OnError,
    Shuffle,
    Transform,
    refuse_unclear_policy,
    shuffled,
)
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_cpu
from dream_trainer.errors import DataError

logger = logging.getLogger("dream_trainer")


class TransformedDataset(Dataset[Any]):
    """A map-style dataset seen through `Map`, `Filter`, `Batch` and `Shuffle`, in their order.

    Give it to a `DistributedDataLoader`, which seeds what functions draw by sample, or to a `Mixture` as a source. A
    `Filter` is computed once, here: it loads every sample. Give every rank the same `seed`.

    Args:
        dataset: Map-style.
        transforms: What is done, in this order.
        on_error: What to do with a sample that cannot be loaded or for which a function raises: "raise", or "skip":
            the next sample that can be loaded comes in its place, and it is counted and logged.
        max_skipped: With "skip", how many different samples may be skipped in one process (each worker is one).
        seed: Of the windows' orders, and of what filters draw.

    Attributes:
        skipped: Numbers of samples that this process skipped.

    Raises:
        DataError: The dataset is empty or nothing of it is kept, a sample is broken, or a transform cannot be used
            here.
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Sequence[Transform],
        *,
        on_error: OnError = "raise",
        max_skipped: int | None = None,
        seed: int = 0,
    ) -> None:
        self._max_skipped = refuse_unclear_policy(on_error, max_skipped)
        self._name = type(dataset).__name__
        self.skipped: set[int] = set()
        view: View = Whole(dataset)
        for stage, transform in enumerate(transforms):
            view = self._seen_through(transform, view, hash_seed(b"transform", seed, stage))
        if len(view) == 0:
            raise DataError(f"Nothing of the dataset ({self._name}) is left by its transforms. Check its filters.")
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, index: int) -> Any:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"Sample {index} of {length}.")
        for number in range(index, index + length):
            try:
                return self._view.load(number % length)
            except BrokenSampleError as broken:
                self._skip(broken)
        raise DataError(f"No sample of the dataset ({self._name}) can be loaded.")

    def _skip(self, broken: BrokenSampleError) -> None:
        what = f"sample {broken.index} of {self._name}: {type(broken.error).__name__}: {broken.error}"
        if self._max_skipped == 0:
            raise DataError(
                f'{what}. Mend or leave out the sample, or skip such ones by on_error="skip" and max_skipped.'
            ) from broken.error
        if broken.index not in self.skipped:
            self.skipped.add(broken.index)
            logger.warning("skipped %s (%d skipped in this process)", what, len(self.skipped))
        if len(self.skipped) > self._max_skipped:
            raise DataError(
                f"{what}. With it {len(self.skipped)} samples would be skipped in this process, and "
                f"max_skipped={self._max_skipped}. Mend the data, or raise max_skipped."
            ) from broken.error

    def _seen_through(self, transform: Transform, view: View, seed: int) -> View:
        if isinstance(transform, Map):
            return Mapped(view, transform.function)
        if isinstance(transform, Filter):
            return Chosen(view, self._kept(transform, view, seed))
        if isinstance(transform, Batch):
            return Batched(view, transform.size)
        if isinstance(transform, Shuffle):
            return Windows(view, transform.window, seed)
        raise DataError(
            f"{type(transform).__name__} makes another number of samples of each, so they cannot be reached by number. "
            "Use it in a StreamLoader; documents of known lengths are packed by PackedRows."
        )

    def _kept(self, transform: Filter, view: View, seed: int) -> list[int]:
        kept = []
        with preserved_random_state():
            for index in range(len(view)):
                seed_cpu(hash_seed(b"sample", seed, index))
                try:
                    sample = view.load(index)
                    if called(transform.function, sample, view.origin(index)):
                        kept.append(index)
                except BrokenSampleError as broken:
                    self._skip(broken)
        return kept


class BrokenSampleError(Exception):
    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(index, error)
        self.index, self.error = index, error


def called(function: Callable[[Any], Any], argument: Any, origin: int) -> Any:
    """The function's result; what it raises is said to be of the sample `origin`."""
    try:
        return function(argument)
    except Exception as error:
        raise BrokenSampleError(origin, error) from error


class View:
    """What is seen through one more transform than in the view below: here, nothing else."""

    def __init__(self, below: View) -> None:
        self._below = below

    def __len__(self) -> int:
        return len(self._below)

    def _place(self, index: int) -> int:
        """Which sample of the view below it is; of several the first."""
        return index

    def load(self, index: int) -> Any:
        """A sample; raises BrokenSampleError."""
        return self._below.load(self._place(index))

    def origin(self, index: int) -> int:
        """The number, in the user's dataset, of what sample `index` is made of; of several the first."""
        return self._below.origin(self._place(index))


class Whole(View):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def load(self, index: int) -> Any:
        return called(self._dataset.__getitem__, index, index)

    def origin(self, index: int) -> int:
        return index


class Mapped(View):
    def __init__(self, below: View, function: Callable[[Any], Any]) -> None:
        super().__init__(below)
        self._function = function

    def load(self, index: int) -> Any:
        return called(self._function, super().load(index), self.origin(index))


class Chosen(View):
    def __init__(self, below: View, indices: Sequence[int]) -> None:
        super().__init__(below)
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def _place(self, index: int) -> int:
        return self._indices[index]


class Batched(View):
    """Lists of consecutive samples; the last may be shorter."""

    def __init__(self, below: View, size: int) -> None:
        super().__init__(below)
        self._size = size

    def __len__(self) -> int:
        return -(-len(self._below) // self._size)

    def _place(self, index: int) -> int:
        return index * self._size

    def load(self, index: int) -> Any:
        first = self._place(index)
        return [self._below.load(place) for place in range(first, min(first + self._size, len(self._below)))]


class Windows(View):
    """Each window of consecutive samples in random order."""

    def __init__(self, below: View, window: int, seed: int) -> None:
        super().__init__(below)
        self._window, self._seed = window, seed
        self._last: tuple[int, list[int]] = (-1, [])

    def _place(self, index: int) -> int:
        window, place = divmod(index, self._window)
        first = window * self._window
        if self._last[0] != window:
            size = min(self._window, len(self) - first)
            self._last = window, shuffled(size, hash_seed(b"window", self._seed, window))
        return first + self._last[1][place]
