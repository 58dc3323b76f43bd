"""The iterator of torch's `DataLoader`, without what that does for profilers at each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.autograd import profiler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

_TORCHS = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)


class QuietIterator(Iterator[Any]):
    """The batches of an iterator of a `DataLoader`, 12 us sooner: each `next` of that is a range for profilers, of
    which this opens none unless one is running.

    Args:
        iterator: Of torch's own classes, which begins here.
    """

    __slots__ = ("_next_data", "_plain")

    def __init__(self, iterator: Any) -> None:
        self._plain = iterator.__next__
        self._next_data = iterator._next_data

    def __next__(self) -> Any:
        return self._plain() if profiler._is_profiler_enabled else self._next_data()


def quiet(iterator: Any) -> Iterator[Any]:
    """`iterator` as a QuietIterator, if it is one of torch's `DataLoader`; else as it is.

    So is that of an iterable dataset whose length was asked for: it warns where there are more samples than that.
    """
    if type(iterator) in _TORCHS and iterator._IterableDataset_len_called is None:
        return QuietIterator(iterator)
    batches: Iterator[Any] = iterator
    return batches
