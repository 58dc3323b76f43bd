"""Loaders that are not ours, stopped at each window and resumed by new objects: the same batches as in one go."""

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from dream_trainer.checkpoint import typed_json
from tests.api import DataError, DataPosition, PerRankLoader, SampleCount, TrainStream
from tests.data import reading
from tests.data.reading import read, windows_until
from tests.data.samples import KeepsNext, LiveShuffle, Order, ShuffledStream, global_states

LENGTH = 20


class OrderAtStart(KeepsNext):
    """Draws a pass's order when the pass begins, and knows only how far it is in it."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(LENGTH).tolist()
        while self.next < LENGTH:
            self.next += 2
            yield order[self.next - 2 : self.next]
        self.next = 0


class EndedUntilRead(KeepsNext):
    """Keeps a state that was loaded until it has read it to its end, also where that was its end already."""

    was_loaded = False

    def __iter__(self) -> Iterator[list[Any]]:
        if not self.was_loaded:
            self.next = 0
        self.was_loaded = False
        while self.next < LENGTH:
            self.next += 2
            yield [self.next - 2, self.next - 1, random.random()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.was_loaded = True


class LazyBatches:
    """A batch sampler that draws its order when the first batch is asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(LENGTH).tolist()
        yield from (order[first : first + 2] for first in range(0, LENGTH, 2))

    def __len__(self) -> int:
        return LENGTH // 2


DATA = list(range(LENGTH))


def nodes_by_number() -> nodes.Loader[Any]:
    return nodes.Loader(nodes.Batcher(nodes.MapStyleWrapper(DATA, RandomSampler(DATA)), 2))


def weighted(generator: torch.Generator | None = None) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * LENGTH, LENGTH, replacement=False, generator=generator)


MAKERS: dict[str, Callable[[], Any]] = {
    "live shuffle": lambda: LiveShuffle(LENGTH, 2, 6),
    "order at start": OrderAtStart,
    "ended until read": EndedUntilRead,
    "nodes": nodes_by_number,
    "weighted": lambda: DataLoader(DATA, 2, sampler=weighted()),
    "stateful, workers": lambda: StatefulDataLoader(DATA, 2, sampler=weighted(), num_workers=2),
    "lazy": lambda: StatefulDataLoader(DATA, batch_sampler=LazyBatches()),
    "stateful stream": lambda: StatefulDataLoader(ShuffledStream(LENGTH), 2),
}


def open_stream(loader: Any, accumulation: int = 3, **options: Any) -> TrainStream:
    return reading.open_stream(loader, accumulation, **options)


@pytest.mark.pitfall(33)
@pytest.mark.pitfall(75)
@pytest.mark.pitfall(76)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_resumed_pass_has_the_batches_of_the_uninterrupted_one(kind: str) -> None:
    make = MAKERS[kind]
    expected = read(open_stream(make()), passes=3)
    assert sorted(number for batch in expected[0:4] for row in batch for number in row if number in DATA) == DATA
    assert expected[0:4] != expected[4:8]  # another order in each pass
    for stop_after in range(1, 8):
        last = windows_until(open_stream(make()), stop_after)[-1]
        state = typed_json.loads(typed_json.dumps(last.rank_state))
        torch.manual_seed(stop_after)
        random.seed(stop_after)
        second = open_stream(make())
        second.seek(last.end, state, is_pass_over=False, state=None)
        assert read(second, passes=3 - last.end.epoch) == expected[stop_after:], stop_after


@pytest.mark.pitfall(75)
def test_a_state_that_was_loaded_and_not_yet_left_behind_is_saved_again_as_it_was() -> None:
    stream = open_stream(MAKERS["live shuffle"]())
    window = stream.next_window()
    assert window.rank_state is not None
    before = typed_json.dumps(window.rank_state)
    second = open_stream(MAKERS["live shuffle"]())
    second.seek(window.end, window.rank_state, is_pass_over=False, state=None)
    second.next_window()
    assert typed_json.dumps(window.rank_state) == before


@pytest.mark.pitfall(76)
@pytest.mark.parametrize("kind", MAKERS)
def test_training_draws_the_same_whatever_its_loader_draws(kind: str) -> None:
    before = global_states()
    read(open_stream(MAKERS[kind]()), passes=2)
    assert global_states() == before


class Strided:
    """Each rank's part of one shuffled order, as `DistributedSampler` deals it; counts what is read."""

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        self.size, self.rank, self.world_size, self.reads = size, rank, world_size, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(48, generator=torch.Generator().manual_seed(1))[self.rank :: self.world_size]
        for batch in order.split(self.size):
            self.reads += 1
            yield batch


class StridedWithState(Strided):
    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("another number of ranks cannot use it")


@pytest.mark.pitfall(76)
@pytest.mark.parametrize("kind", [Strided, StridedWithState])
def test_on_another_number_of_ranks_a_loader_is_read_again_by_samples(kind: type[Strided]) -> None:
    # 2 ranks consumed 3 batches of 4 each, 24 of 48 samples; one rank with batches of 8 has the other 24 to train.
    whole = read(open_stream(kind(8, 0, 1), accumulation=1), passes=1)
    stream = open_stream(kind(8, 0, 1), accumulation=1, batch_size=SampleCount())
    stream.seek(DataPosition(0, 24, 3), None, is_pass_over=False, state=None)
    assert read(stream, passes=1) == whole[3:]
    four = [PerRankLoader(kind(2, rank, 4)) for rank in range(4)]
    rest = []
    for rank, loader in enumerate(four):
        stream = open_stream(loader, accumulation=1, rank=rank, size=4, batch_size=SampleCount())
        stream.seek(DataPosition(0, 24, 3), None, is_pass_over=False, state=None)
        rest += [number for ((batch,),) in zip(read(stream, passes=1)) for number in batch]
    assert sorted(rest) == sorted(number for (batch,) in whole[3:] for number in batch)


@pytest.mark.pitfall(76)
def test_what_cannot_be_read_again_exactly_is_refused_by_name() -> None:
    stream = open_stream(Strided(5, 0, 1), batch_size=SampleCount())
    with pytest.raises(DataError, match=r"24 samples.*Strided.*so far have 25"):
        stream.seek(DataPosition(0, 24, 3), None, is_pass_over=False, state=None)
    stream = open_stream(PerRankLoader(Strided(5, 0, 1)), size=5, batch_size=SampleCount())
    with pytest.raises(DataError, match="24 samples.*dp_size=5"):
        stream.seek(DataPosition(0, 24, 3), None, is_pass_over=False, state=None)
    stream = open_stream(Strided(8, 0, 1), batch_size=SampleCount())
    with pytest.raises(DataError, match="64 samples.*batches so far have 48"):
        stream.seek(DataPosition(0, 64, 3), None, is_pass_over=False, state=None)


@pytest.mark.pitfall(76)
def test_a_loader_is_not_read_again_where_a_new_pass_begins_anyway(caplog: pytest.LogCaptureFixture) -> None:
    loader = Strided(4, 0, 1)
    stream = open_stream(loader, batch_size=SampleCount())
    with caplog.at_level(logging.WARNING, "dream_trainer"):
        stream.seek(DataPosition(0, 48, 12), None, is_pass_over=True, state=None)
    assert (loader.reads, caplog.records) == (0, [])
    assert stream.next_window().end == DataPosition(1, 0, 3)


@pytest.mark.pitfall(76)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_later_pass_is_resumed_where_workers_persist(kind: type[Any]) -> None:
    def opened() -> TrainStream:
        return open_stream(kind(DATA, 2, sampler=Order(LENGTH), num_workers=1, persistent_workers=True), 1)

    straight, stopped, resumed = opened(), opened(), opened()
    expected = read(straight, passes=2)
    at = windows_until(stopped, 14)[-1]  # of 10 windows in a pass
    resumed.seek(at.end, at.rank_state, is_pass_over=False, state=None)
    assert read(resumed, passes=1) == expected[14:]
    assert sorted(number for (batch,) in expected[10:] for number in batch) == DATA
    for stream in (straight, stopped, resumed):
        stream.close()
