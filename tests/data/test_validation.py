from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.api import DataError, DistributedDataLoader
from tests.data.reading import open_stream, open_validation
from tests.data.samples import DrawingDataset, ShuffledStream, global_states, rows


@pytest.mark.pitfall(13)
@pytest.mark.parametrize(("length", "size"), [(7, 1), (7, 2), (7, 3), (2, 3), (1, 4), (16, 4)])
@pytest.mark.parametrize("make", [DistributedDataLoader, DataLoader])
def test_every_sample_is_validated_exactly_once_and_in_order(length: int, size: int, make: Any) -> None:
    loader = make(TensorDataset(torch.arange(length)), 2, shuffle=True, drop_last=True)
    ranks = [open_validation(loader, rank, size) for rank in range(size)]
    batches = [[batch.tolist() for (batch,) in rank] for rank in ranks]
    assert sorted(index for rank in batches for batch in rank for index in batch) == list(range(length))
    in_order = [
        index
        for chunk in range(len(batches[0]))
        for rank in batches
        for index in (rank[chunk] if chunk < len(rank) else [])
    ]
    assert in_order == list(range(length))
    assert len(batches[0]) - len(batches[-1]) in (0, 1)


@pytest.mark.pitfall(32)
@pytest.mark.parametrize("workers", [0, 1])
def test_each_validation_reads_the_same_draws_at_any_world_size(workers: int) -> None:
    before = global_states()
    loader = DistributedDataLoader(DrawingDataset(6), 3, num_workers=workers)
    whole = open_validation(loader)
    first = [row for batch in whole for row in rows(batch)]
    assert [row for batch in whole for row in rows(batch)] == first
    halves = [open_validation(DistributedDataLoader(DrawingDataset(6), 3), rank, 2) for rank in (0, 1)]
    assert [row for half in halves for batch in half for row in rows(batch)] == first
    assert global_states() == before


def test_a_validation_that_is_broken_off_begins_anew() -> None:
    data = open_validation(DistributedDataLoader(DrawingDataset(6), 2, num_workers=1, persistent_workers=True))
    next(iter(data))
    assert [batch["index"].tolist() for batch in data] == [[0, 1], [2, 3], [4, 5]]
    data.close()


def test_a_foreign_loader_is_validated_as_it_is_on_one_rank_and_refused_beyond() -> None:
    loader = DataLoader(ShuffledStream(6), 2)
    data = open_validation(loader)
    first = [batch.tolist() for batch in data]
    assert sorted(index for batch in first for index in batch) == list(range(6))
    assert [batch.tolist() for batch in data] == first
    with pytest.raises(DataError, match="PerRankLoader"):
        open_validation(loader, size=2)


def test_of_a_dataset_without_samples_it_is_said_whose_it_is() -> None:
    empty = DataLoader(TensorDataset(torch.ones(0)))
    for open_data in (open_validation, open_stream):
        with pytest.raises(DataError, match=r"The dataset \(TensorDataset\) has 0 samples\. Check its path"):
            open_data(empty)


@pytest.mark.pitfall(77)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_validation_reads_the_dataset_as_long_as_it_is_then(num_workers: int) -> None:
    data = [torch.tensor([float(index)]) for index in range(3)]
    loader = DataLoader(data, batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)
    found = open_validation(loader)
    for more in (0, 2):
        data += [torch.tensor([float(len(data) + index)]) for index in range(more)]
        assert torch.cat(list(found)).flatten().tolist() == [float(index) for index in range(3 + more)]
    found.close()
