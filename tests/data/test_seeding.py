import random
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate, get_worker_info

from tests.api import DistributedDataLoader, KeyedDataset, draws_nothing, sample_seed, seed_cpu, validation_batches
from tests.data.samples import DrawingDataset, global_states, rows
from tests.data.test_pass_draws import DRAWS, drawn_with


def test_datasets_of_tensors_and_their_parts_are_known_to_draw_nothing() -> None:
    tensors = TensorDataset(torch.ones(4))
    assert draws_nothing(tensors)
    assert draws_nothing(Subset(ConcatDataset([tensors, Subset(tensors, [1])]), [0]))
    assert not draws_nothing(ConcatDataset([tensors, DrawingDataset(3)]))
    assert KeyedDataset(tensors, default_collate, 7).seed is None


def test_a_subset_is_seeded_per_sample_though_torch_gives_it_getitems() -> None:
    data = KeyedDataset(Subset(DrawingDataset(10), [8, 6, 4]), default_collate, 7)
    assert rows(data.__getitems__((0, [0, 1])))[1] == rows(data.__getitems__((0, [1])))[0]


class LateDataset:
    """Draws from one generator for samples from `first` on, and notes what it loads."""

    def __init__(self, kind: str, first: int) -> None:
        self.kind, self.first = kind, first
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float | None:
        self.loaded.append(index)
        return DRAWS[self.kind]() if index >= self.first else None


@pytest.mark.parametrize("in_process", ["batch by batch", "a window", "no"])
@pytest.mark.parametrize("first", [0, 3, 11])
@pytest.mark.parametrize("kind", list(DRAWS))
def test_a_sample_that_is_the_first_to_draw_does_so_from_its_own_seed(kind: str, first: int, in_process: str) -> None:
    dataset = LateDataset(kind, first)
    data = KeyedDataset(dataset, list, 7)
    seed_cpu(1)
    before = global_states()
    drawn: list[float | None] = []
    with data.apart if in_process == "a window" else nullcontext():
        for start in (0, 3, 6, 9):
            with data.apart if in_process == "batch by batch" else nullcontext():
                drawn += data.__getitems__((2, [start, start + 1, start + 2]))
    expected = [next(drawn_with(sample_seed(7, 2, index))[kind]) for index in range(first, 12)]
    assert drawn == [None] * first + expected
    assert len(dataset.loaded) == (15 if first > 2 else 12)  # the batch with the first draw is loaded twice
    if in_process != "no":
        assert global_states() == before


def test_a_collate_function_that_begins_to_draw_late_does_so_from_its_last_samples_seed() -> None:
    data = KeyedDataset(LateDataset("torch", 12), lambda samples: random.random() if len(samples) == 3 else None, 7)
    assert data.__getitems__((0, [0])) is None
    assert data.__getitems__((0, [1, 2, 3])) == random.Random(sample_seed(7, 0, 3)).random()


class OffsetDataset:
    """Its samples depend on what a worker_init_fn sets on it."""

    offset = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def set_offset(worker_id: int) -> None:
    get_worker_info().dataset.offset = 100  # type: ignore[union-attr]


def test_a_worker_init_fn_finds_the_users_own_dataset() -> None:
    loader = DistributedDataLoader(OffsetDataset(), 4, num_workers=1, worker_init_fn=set_offset)
    data = validation_batches(loader, dp_rank=0, dp_size=1, seed=1)
    assert [batch.tolist() for batch in data] == [[100, 101, 102, 103]]
