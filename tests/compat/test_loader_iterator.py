"""Batches of a `DataLoader` without its ranges for profilers: the same ones, and with a profiler those ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from dream_trainer.compat.loader_iterator import QuietIterator, quiet


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class FalseLength(Stream):
    def __len__(self) -> int:
        return 4


def read(batches: Iterator[Any]) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [range(10), Stream()], ids=["map", "iterable"])
def test_the_batches_are_the_same(dataset: Any, workers: int) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=4, num_workers=workers)

    batches = quiet(iter(loader()))
    assert isinstance(batches, QuietIterator)
    assert read(batches) == read(iter(loader()))
    assert next(batches, None) is None


def test_a_sample_that_raises_does_not_end_the_pass() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                raise KeyError(index)
            return super().__getitem__(index)

    batches = quiet(iter(DataLoader(Broken([5, 6, 7]), batch_size=None)))
    assert next(batches) == 5
    with pytest.raises(KeyError):
        next(batches)
    assert next(batches) == 7


def test_a_profiler_sees_the_loader() -> None:
    batches = quiet(iter(DataLoader(range(10))))
    next(batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        next(batches)
    assert any("DataLoader" in event.key for event in profile.key_averages())
    assert next(batches).item() == 2


def test_a_wrong_length_is_still_warned_of() -> None:
    loader = DataLoader(FalseLength(), batch_size=2)
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert len(list(quiet(iter(loader)))) == 5


def test_other_iterators_are_left_alone() -> None:
    iterator = iter([1, 2])
    assert quiet(iterator) is iterator
