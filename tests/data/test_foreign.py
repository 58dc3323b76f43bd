import logging
from collections.abc import Iterator
from itertools import count

import pytest
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.api import DataError, DataPosition
from tests.data.reading import open_stream, read
from tests.data.samples import KeepsNext


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
    sampler = EpochSampler(4)
    read(open_stream(DataLoader(list(range(4)), 2, sampler=sampler)), passes=2)
    assert sampler.epochs == [0, 1]


class EpochSampler(Polled):
    def __len__(self) -> int:
        return self.length


def test_an_endless_generator_is_read_window_by_window() -> None:
    stream = open_stream(count(), accumulation=3)
    windows = [stream.next_window() for _ in range(3)]
    assert [window and list(window.batches) for window in windows] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [window and window.end for window in windows] == [DataPosition(0, 0, n) for n in (3, 6, 9)]


@pytest.mark.pitfall(10)
def test_data_that_was_read_once_and_is_empty_then_is_an_error_that_says_why() -> None:
    stream = open_stream(iter([1]))
    read(stream, passes=1)
    with pytest.raises(DataError, match="yielded no batch in pass 1.*an iterator, which can be read once"):
        stream.next_window()


class CountedStream(KeepsNext, IterableDataset):
    """An iterable dataset that knows where it is and notes what it produced in this process."""

    def __init__(self) -> None:
        self.produced: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.next < 12:
            self.next += 1
            self.produced.append(self.next - 1)
            yield self.next - 1
        self.next = 0


def test_reading_again_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    stream = open_stream([1, 2, 3])
    with caplog.at_level(logging.WARNING, "dream_trainer"):
        stream.seek(DataPosition(0, 0, 0), None, is_pass_over=False, state=None)
        assert caplog.records == []
        stream.seek(DataPosition(0, 0, 2), None, is_pass_over=False, state=None)
    assert "reads 2 batches again" in caplog.records[0].message
    assert read(stream, passes=1) == [[3]]


@pytest.mark.pitfall(34)
def test_a_stateful_dataset_resumes_without_producing_what_was_consumed() -> None:
    first = open_stream(StatefulDataLoader(CountedStream(), 2))
    window = [first.next_window() for _ in range(4)][-1]
    data = CountedStream()
    second = open_stream(StatefulDataLoader(data, 2))
    second.seek(window.end, window.rank_state, is_pass_over=False, state=None)
    assert read(second, passes=1) == [[[8, 9]], [[10, 11]]]
    assert data.produced == [8, 9, 10, 11]


def test_an_iterator_can_be_sought_before_it_is_read_only() -> None:
    stream = open_stream(iter(range(6)), accumulation=2)
    stream.seek(DataPosition(0, 0, 4), None, is_pass_over=False, state=None)
    assert read(stream, passes=1) == [[4, 5]]
    with pytest.raises(DataError, match="cannot be restarted"):
        stream.seek(DataPosition(0, 0, 0), None, is_pass_over=False, state=None)
