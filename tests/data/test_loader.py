from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.api import DataError, DistributedDataLoader, PerRankLoader, loader_batch_size, rebuild
from tests.data.reading import open_stream
from tests.data.samples import ShuffledStream

DATA = TensorDataset(torch.arange(12))


def keep_list(samples: list[Any]) -> list[Any]:
    return samples


def note_worker(worker_id: int) -> None:
    pass


class MyLoader(DataLoader):
    """A loader with the user's own order."""

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Joined(list[Any]):
    """As PyTorch Geometric joins graphs."""

    @property
    def num_graphs(self) -> int:
        return len(self)


class GraphLoader(DataLoader):
    """As PyTorch Geometric's DataLoader: a constructor that sets how samples are joined."""

    def __init__(self, dataset: Any, batch_size: int = 1, shuffle: bool = False, follow: Any = None, **kw: Any) -> None:
        kw.pop("collate_fn", None)
        self.follow = follow
        super().__init__(dataset, batch_size, shuffle, collate_fn=Joined, **kw)


class MyBatchSampler(BatchSampler):
    """A batch sampler of the user's own class."""


@pytest.mark.parametrize(
    ("loader", "shuffle"),
    [
        (DataLoader(DATA, 4), False),
        (DataLoader(DATA, 4, shuffle=True), True),
        (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)), True),
        (DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, 0)), True),
        (DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, 0, shuffle=False)), False),
        (StatefulDataLoader(DATA, 4, shuffle=True), True),
    ],
)
def test_plain_loaders_are_rebuilt_as_ours(loader: DataLoader, shuffle: bool) -> None:
    own = rebuild(loader)
    assert (own.dataset, own.batch_size, own.shuffle, own.drop_last) == (DATA, 4, shuffle, False)


def test_a_rebuilt_loader_keeps_every_option() -> None:
    options = {"batch_size": 3, "drop_last": True, "collate_fn": keep_list, "num_workers": 2, "pin_memory": True}
    options |= {"persistent_workers": True, "prefetch_factor": 5, "worker_init_fn": note_worker, "timeout": 9}
    plain = DataLoader(DATA, multiprocessing_context="spawn", **options)
    own = rebuild(plain)
    for name in (*options, "multiprocessing_context"):
        assert vars(own)[name] == getattr(plain, name), name


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 12, 12)),
        DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
        DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=6)),
        DataLoader(DATA, 4, sampler=SequentialSampler(range(6))),
        DataLoader(DATA, 4, sampler=[3, 2, 1]),
        DataLoader(DATA, batch_size=None),
        DataLoader(DATA, batch_sampler=MyBatchSampler(SequentialSampler(DATA), 4, False)),
        DataLoader(ShuffledStream(8), 4),
        MyLoader(DATA, 4),
        [torch.ones(2)],
    ],
)
@pytest.mark.pitfall(12)
def test_what_cannot_be_rebuilt_serves_one_rank_and_is_refused_with_the_fix_beyond(loader: Any) -> None:
    assert rebuild(loader) is None
    assert open_stream(loader).next_window().size == 1
    with pytest.raises(DataError, match=r"DistributedDataLoader.*PerRankLoader"):
        open_stream(loader, size=2)


@pytest.mark.pitfall(12)
def test_a_subclass_that_adds_only_a_constructor_is_dealt_with_all_that_it_sets() -> None:
    """As PyTorch Geometric's loader of graphs."""
    seen = []
    for rank in range(2):
        loader = GraphLoader(DATA, 3, shuffle=True, follow=["x"])
        stream = open_stream(loader, rank=rank, size=2)
        while (window := stream.next_window()) is not None:
            (batch,) = window.batches
            assert type(batch) is Joined
            assert window.sizes == [batch.num_graphs] == [3]
            seen += [int(sample[0]) for sample in batch]
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("ShuffledStream has no length", lambda: DistributedDataLoader(ShuffledStream(4), 2)),
        ("batch_size=0", lambda: DistributedDataLoader(DATA, 0)),
        ("0 samples", lambda: DistributedDataLoader(TensorDataset(torch.ones(0)), 2)),
        ("several ranks already", lambda: PerRankLoader(DistributedDataLoader(DATA, 2))),
        ("int is no iterable of batches", lambda: open_stream(PerRankLoader(3))),
        (
            r"MyLoader cannot be dealt to dp_size=2.*own methods decide its samples",
            lambda: open_stream(MyLoader(DATA, 4), size=2),
        ),
    ],
)
def test_wrong_datasets_loaders_and_batch_sizes_are_refused(message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(DataError, match=message):
        make()


def test_the_batch_size_is_read_where_the_loader_says_it() -> None:
    assert loader_batch_size(DistributedDataLoader(DATA, 3)) == 3
    assert loader_batch_size(DataLoader(DATA, 5)) == 5
    assert loader_batch_size(PerRankLoader(DataLoader(ShuffledStream(8), 4))) == 4
    assert loader_batch_size(DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 6, True))) == 6
    assert loader_batch_size([torch.ones(2)]) is None
