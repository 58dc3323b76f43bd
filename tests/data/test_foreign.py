from __future__ import annotations

import logging
import timeit
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.api import DataError, DataPosition, PerRankLoader, TrainStream, train_stream
from tests.data.samples import DrawingDataset, ShuffledStream, global_states, rows


def open_stream(loader: Any, accumulation: int = 1, rank: int = 0, size: int = 1) -> TrainStream:
    return train_stream(loader, accumulation=accumulation, dp_rank=rank, dp_size=size, seed=3)


def read(stream: TrainStream, passes: int) -> list[list[Any]]:
    """Each window's batches, as lists of numbers."""
    windows = []
    while passes:
        window = stream.next_window()
        if window is None:
            passes -= 1
        else:
            windows.append([batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in window.batches])
    return windows


class Polled:
    """An iterable that counts what is asked of it; asked past its end twice it fails, as a socket would."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pulled = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return PolledIterator(self)


class PolledIterator:
    def __init__(self, source: Polled) -> None:
        self.source, self.next, self.is_over = source, 0, False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.next == self.source.length:
            assert not self.is_over, "polled past the end twice"
            self.is_over = True
            raise StopIteration
        self.next += 1
        self.source.pulled += 1
        return self.next - 1


@pytest.mark.pitfall(1)
@pytest.mark.pitfall(10)
def test_a_pass_that_ends_inside_a_window_gives_a_short_one_and_never_straddles() -> None:
    assert read(open_stream([0, 1, 2, 3, 4], accumulation=2), passes=2) == [[0, 1], [2, 3], [4]] * 2
    assert read(open_stream([0, 1, 2, 3], accumulation=2), passes=2) == [[0, 1], [2, 3]] * 2
    assert read(open_stream([0], accumulation=4), passes=1) == [[0]]


@pytest.mark.pitfall(8)
@pytest.mark.parametrize("length", [4, 5])
def test_no_batch_is_pulled_that_is_not_handed_out_and_the_end_is_polled_once(length: int) -> None:
    source = Polled(length)
    stream = open_stream(source, accumulation=2)
    assert source.pulled == 0
    stream.next_window()
    assert source.pulled == 2
    read(stream, passes=2)
    assert source.pulled == 2 * length


@pytest.mark.pitfall(11)
def test_the_epoch_is_told_to_loaders_samplers_and_datasets_that_want_it() -> None:
    source = Polled(2)
    read(open_stream(source), passes=3)
    assert source.epochs == [0, 1, 2]
    sampler = EpochSampler()
    read(open_stream(DataLoader(list(range(4)), 2, sampler=sampler)), passes=2)
    assert sampler.epochs == [0, 1]


class EpochSampler:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


def test_steps_per_epoch_are_known_where_the_length_is() -> None:
    assert open_stream([1, 2, 3, 4, 5], accumulation=2).steps_per_epoch == 3
    assert open_stream(x for x in range(3)).steps_per_epoch is None
    assert open_stream(DataLoader(ShuffledStream(8), 4)).steps_per_epoch is None


def test_an_endless_generator_is_read_window_by_window() -> None:
    stream = open_stream(count(), accumulation=3)
    windows = [stream.next_window() for _ in range(3)]
    assert [window and list(window.batches) for window in windows] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [window and window.end for window in windows] == [DataPosition(0, 0, n) for n in (3, 6, 9)]


@pytest.mark.pitfall(10)
def test_empty_data_is_an_error_that_says_why() -> None:
    with pytest.raises(DataError, match=r"\(list\) has 0 batches"):
        open_stream([])
    with pytest.raises(DataError, match="yielded no batch in pass 0"):
        open_stream(DataLoader(ShuffledStream(0), 2)).next_window()
    stream = open_stream(iter([1]))
    read(stream, passes=1)
    with pytest.raises(DataError, match="can be read once, and pass 1 over it found nothing"):
        stream.next_window()


@pytest.mark.pitfall(13)
def test_a_per_rank_loader_is_used_as_it_is_on_each_rank() -> None:
    loaders = [PerRankLoader([10, 11, 12]), PerRankLoader(iter([])), PerRankLoader([20])]
    streams = [open_stream(loader, accumulation=2, rank=rank, size=3) for rank, loader in enumerate(loaders)]
    assert [read(stream, passes=1) for stream in streams] == [[[10, 11], [12]], [], [[20]]]
    assert not any(stream.is_even for stream in streams)


def weighted() -> DataLoader:
    data = DrawingDataset(20)
    return DataLoader(data, 2, sampler=WeightedRandomSampler([1.0 + i for i in range(20)], 20), collate_fn=collate)


def collate(samples: list[Any]) -> list[tuple[float, ...]]:
    return rows(torch.utils.data.default_collate(samples))


def buffered() -> DataLoader:
    return DataLoader(ShuffledStream(20), 2)


def stateful(workers: int = 0) -> StatefulDataLoader:
    data = DrawingDataset(20)
    sampler = WeightedRandomSampler([1.0] * 20, 20, replacement=False)
    return StatefulDataLoader(data, 2, sampler=sampler, num_workers=workers, collate_fn=indices)


def indices(samples: list[Any]) -> list[int]:
    return [sample["index"] for sample in samples]


class CountedStream(IterableDataset):
    """An iterable dataset that knows where it is and notes what it produced in this process."""

    def __init__(self) -> None:
        self.next = 0
        self.produced: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.next < 12:
            self.next += 1
            self.produced.append(self.next - 1)
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.pitfall(33)
@pytest.mark.parametrize("make", [weighted, buffered])
@pytest.mark.parametrize("stop_after", [0, 1, 3, 4, 5])
def test_a_plain_loader_in_its_own_order_resumes_by_reading_again(make: Any, stop_after: int) -> None:
    expected = read(open_stream(make(), accumulation=3), passes=3)
    first = open_stream(make(), accumulation=3)
    windows = [window for window in (first.next_window() for _ in range(stop_after)) if window is not None]
    position = windows[-1].end if windows else DataPosition(0, 0, 0)
    torch.rand(3)  # whatever training draws
    second = open_stream(make(), accumulation=3)
    second.seek(position, None)
    assert read(second, passes=3 - position.epoch) == expected[len(windows) :]


def test_reading_again_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    stream = open_stream([1, 2, 3])
    with caplog.at_level(logging.WARNING, "dream_trainer"):
        stream.seek(DataPosition(0, 0, 0), None)
        assert caplog.records == []
        stream.seek(DataPosition(0, 0, 2), None)
    assert "reads 2 batches again" in caplog.records[0].message
    assert read(stream, passes=1) == [[3]]


@pytest.mark.pitfall(33)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_after", [1, 3, 4, 6])
def test_a_stateful_loader_resumes_from_the_state_of_the_window_that_was_trained(workers: int, stop_after: int) -> None:
    expected = read(open_stream(stateful(workers), accumulation=3), passes=2)
    first = open_stream(stateful(workers), accumulation=3)
    windows = []
    while len(windows) < stop_after:
        if (window := first.next_window()) is not None:
            windows.append(window)
    first.next_window()  # read ahead, as the loop does
    end, state = windows[-1].end, windows[-1].rank_state
    torch.rand(3)  # whatever training draws
    second = open_stream(stateful(workers), accumulation=3)
    second.seek(end, state)
    assert read(second, passes=2 - end.epoch) == expected[stop_after:]


@pytest.mark.pitfall(34)
def test_a_stateful_dataset_resumes_without_producing_what_was_consumed() -> None:
    first = open_stream(StatefulDataLoader(CountedStream(), 2))
    window = [first.next_window() for _ in range(4)][-1]
    data = CountedStream()
    second = open_stream(StatefulDataLoader(data, 2))
    second.seek(window.end, window.rank_state)
    assert read(second, passes=1) == [[[8, 9]], [[10, 11]]]
    assert data.produced == [8, 9, 10, 11]


@pytest.mark.pitfall(32)
@pytest.mark.parametrize("make", [weighted, buffered, lambda: StatefulDataLoader(ShuffledStream(20), 2)])
def test_torch_loaders_leave_the_global_generators_untouched(make: Any) -> None:
    before = global_states()
    read(open_stream(make()), passes=2)
    assert global_states() == before


@pytest.mark.pitfall(11)
def test_ranks_and_passes_of_a_torch_loader_draw_differently() -> None:
    streams = [open_stream(PerRankLoader(weighted()), rank=rank, size=2) for rank in (0, 1)]
    passes = [read(stream, passes=1) for stream in streams for _ in range(2)]
    assert len({str(windows) for windows in passes}) == 4


@pytest.mark.pitfall(32)
def test_resuming_any_iterable_leaves_the_global_generators_untouched() -> None:
    stream = open_stream(PerRankLoader(Noise()))
    before = global_states()
    stream.seek(DataPosition(0, 0, 3), None)
    assert global_states() == before


class Noise:
    """Batches drawn from the global generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(2) for _ in range(5))


def test_an_iterator_that_was_read_cannot_be_sought() -> None:
    stream = open_stream(iter([1, 2, 3]))
    stream.next_window()
    with pytest.raises(DataError, match="cannot go back"):
        stream.seek(DataPosition(0, 0, 0), None)


def test_an_iterator_can_be_sought_before_it_is_read() -> None:
    stream = open_stream(iter(range(6)), accumulation=2)
    stream.seek(DataPosition(0, 0, 4), None)
    assert read(stream, passes=1) == [[4, 5]]


def test_windows_of_a_list_cost_microseconds() -> None:
    batches = list(range(20_000))

    def bare() -> None:
        for _ in batches:
            pass

    def windows() -> None:
        stream = open_stream(batches, accumulation=4)
        while (window := stream.next_window()) is not None:
            for _ in window.batches:
                pass

    cost = (min(timeit.repeat(windows, number=1, repeat=5)) - min(timeit.repeat(bare, number=1, repeat=5))) / len(
        batches
    )
    assert cost < 3e-6


def test_a_tensor_loader_of_one_rank_needs_no_wrapping() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=None)
    assert [window[0][0].item() for window in read(open_stream(loader), passes=1)] == [0, 1, 2, 3]
    assert list(islice(loader, 0)) == []
