"""Transforms over datasets whose samples are reached by number."""

import random

import pytest

from tests.api import Batch, DataError, Filter, Map, Shuffle, TransformedDataset, Unbatch
from tests.data.reading import Job, open_ranks
from tests.data.samples import BrokenDataset, global_states


def drawn(sample: int) -> tuple[int, float]:
    return sample, random.random()


def test_transforms_are_applied_in_their_order() -> None:
    data = TransformedDataset(
        range(20), [Map(lambda x: x + 1), Filter(lambda x: x % 3), Map(lambda x: -x), Filter(lambda x: x % 2)]
    )
    kept = [-number for number in range(1, 21) if number % 3 and number % 2]
    assert [data[index] for index in range(len(data))] == kept
    assert data[-1] == kept[-1]
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_filter_is_computed_once_and_alike_in_every_process() -> None:
    calls = []

    def keeps(sample: int) -> bool:
        calls.append(sample)
        return random.random() < 0.5

    random.seed(1)
    before = global_states()
    one = TransformedDataset(range(50), [Filter(keeps)])
    assert global_states() == before
    kept = [one[index] for index in range(len(one))]
    assert calls == list(range(50))
    random.seed(2)
    other = TransformedDataset(range(50), [Filter(keeps)])
    assert [other[index] for index in range(len(other))] == kept
    assert 5 < len(kept) < 45


@pytest.mark.parametrize("workers", [0, 2])
def test_what_functions_draw_is_seeded_by_sample_on_any_ranks(workers: int) -> None:
    data = TransformedDataset(range(24), [Filter(lambda x: x != 3), Map(drawn)])
    found = []
    for layout in ((1, 1, workers), (2, 2, workers)):
        job = Job(open_ranks(lambda: data, layout, 8, shuffle=True, collate_fn=list))
        found.append([sorted(sample for batch in batches for sample in batch) for batches in job.read(2)])
        job.close()
    assert found[0] == found[1]


def test_a_broken_sample_is_named_by_its_number_in_the_users_dataset() -> None:
    for transforms in ([Map(lambda x: x)], []):
        data = TransformedDataset(BrokenDataset(), transforms)
        assert data[1] == 1
        with pytest.raises(DataError, match="sample 5 of BrokenDataset: KeyError: 'sample 5 is damaged'"):
            data[5]
    late = TransformedDataset(range(9), [Filter(lambda x: x > 3), Map(lambda x: 1 / (x - 5))])
    with pytest.raises(DataError, match="sample 5 of range: ZeroDivisionError"):
        late[1]
    with pytest.raises(DataError, match="sample 4 of range: ZeroDivisionError"):
        TransformedDataset(range(6), [Filter(lambda x: 1 / (x - 4))])


def test_what_cannot_be_reached_by_number_is_refused() -> None:
    for transform in (Batch(2), Unbatch(), Shuffle(2)):
        with pytest.raises(DataError, match="samples are reached by number here"):
            TransformedDataset(range(6), [transform])
    with pytest.raises(DataError, match="Nothing of the dataset"):
        TransformedDataset(range(6), [Filter(lambda x: False)])
