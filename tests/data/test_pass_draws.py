"""What a loader that is used as it is draws, beside generators of the test's own with the same seeds."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dream_trainer.checkpoint import typed_json
from tests.api import DataPosition, SeededPass, TrainStream, draws_at_start_only, hash_seed, seed_cpu
from tests.data import reading
from tests.data.reading import read, windows_until
from tests.data.samples import KeepsNext, Order, global_states

SEED, EPOCH, RANK, LENGTH = 3, 0, 1, 8
DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
    "python": random.random,
    "numpy": np.random.rand,
    "torch normal": lambda: torch.randn(()).item(),
    "python normal": lambda: random.gauss(0, 1),
    "numpy normal": np.random.randn,
}


def drawn_with(seed: int) -> dict[str, Iterator[float]]:
    """What each of `DRAWS` gives, one after the other, from generators with nobody else."""
    torch_generator = torch.Generator().manual_seed(seed & 0xFFFF_FFFF)
    of_python, of_numpy = random.Random(seed), np.random.RandomState(seed >> 32)
    return {
        "torch": iter(lambda: torch.rand((), dtype=torch.float64, generator=torch_generator).item(), None),
        "python": iter(of_python.random, None),
        "numpy": iter(of_numpy.rand, None),
        "torch normal": iter(lambda: torch.randn((), generator=torch_generator).item(), None),
        "python normal": iter(lambda: of_python.gauss(0, 1), None),
        "numpy normal": iter(of_numpy.randn, None),
    }


def expected_draws(kind: str, first: int) -> list[float]:
    """The draws of a pass whose batches draw from number `first` on."""
    of_pass = drawn_with(hash_seed(b"pass", SEED, EPOCH, RANK))
    of_batch = [drawn_with(hash_seed(b"batch", SEED, EPOCH, number, RANK)) for number in range(LENGTH)]
    return [next((of_batch[number] if number else of_pass)[kind]) for number in range(first, LENGTH)]


class LateNoise:
    """Batches of a number and, from number `first` on, one draw."""

    next = 0

    def __init__(self, kind: str, first: int) -> None:
        self.kind, self.first = kind, first

    def __iter__(self) -> Iterator[list[float]]:
        while self.next < LENGTH:
            self.next += 1
            number = self.next - 1
            yield [number, DRAWS[self.kind]()] if number >= self.first else [number]
        self.next = 0


class LateNoiseWithState(KeepsNext, LateNoise):
    """The same, which knows where it is."""


@pytest.mark.pitfall(76)
@pytest.mark.parametrize("first", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", list(DRAWS))
def test_a_passs_first_batch_draws_from_the_passes_seed_and_each_later_one_from_its_own(kind: str, first: int) -> None:
    batches = SeededPass(LateNoise(kind, first), seed=SEED, epoch=EPOCH, dp_rank=RANK)
    assert [batch[1] for batch in batches if len(batch) == 2] == expected_draws(kind, first)


@pytest.mark.pitfall(32)
@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("kind", list(DRAWS))
def test_training_draws_as_if_there_were_no_loader(kind: str, first: int) -> None:
    """Of numpy's normal numbers only the first of a pair, as documented."""
    seed_cpu(7)
    alone = drawn_with(7)
    for _ in SeededPass(LateNoise(kind, first), seed=SEED, epoch=EPOCH, dp_rank=RANK):
        for name in ("torch", "python", "numpy", "python normal"):
            assert DRAWS[name]() == next(alone[name])


def open_stream(loader: Any, **options: Any) -> TrainStream:
    return reading.open_stream(loader, 2, seed=SEED, **options)


@pytest.mark.pitfall(33)
@pytest.mark.pitfall(76)
@pytest.mark.parametrize("make", [LateNoise, LateNoiseWithState])
@pytest.mark.parametrize("first", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "numpy normal"])
def test_a_pass_that_begins_to_draw_late_is_resumed_exactly(make: type[LateNoise], first: int, kind: str) -> None:
    expected = read(open_stream(make(kind, first)), passes=2)
    for stop_after in range(1, LENGTH):
        last = windows_until(open_stream(make(kind, first)), stop_after)[-1]
        state = typed_json.loads(typed_json.dumps(last.rank_state))
        seed_cpu(stop_after)
        resumed = open_stream(make(kind, first))
        resumed.seek(last.end, state, is_pass_over=False, state=None)
        assert read(resumed, passes=2 - last.end.epoch) == expected[stop_after:], stop_after


ORDERS: dict[str, Callable[[int], Any]] = {
    "torch": torch.randperm,
    "python": lambda length: random.sample(range(length), length),
    "numpy": np.random.permutation,
}


@pytest.mark.pitfall(76)
@pytest.mark.parametrize("kind", list(ORDERS))
@pytest.mark.parametrize("noise", ["torch", "python", "numpy"])
def test_a_drawn_order_and_drawn_samples_do_not_disturb_each_other_nor_training(kind: str, noise: str) -> None:
    def make() -> DataLoader[Any]:
        data = [None] * LENGTH
        return DataLoader(data, 1, sampler=Order(LENGTH, ORDERS[kind]), collate_fn=lambda _: [DRAWS[noise]()])

    before = global_states()
    expected = read(open_stream(make()), passes=2)
    assert global_states() == before
    resumed = open_stream(make())
    resumed.seek(DataPosition(0, 0, 4), None, is_pass_over=False, state=None)
    assert global_states() == before
    assert read(resumed, passes=2) == expected[2:]
    seeds = [hash_seed(b"batch", SEED, 0, number, 0) for number in range(1, LENGTH)]
    drawn = [batch for window in expected[: LENGTH // 2] for (batch,) in window]
    if kind == noise or noise == "torch":
        assert drawn[1:] == [next(drawn_with(seed)[noise]) for seed in seeds]


@pytest.mark.pitfall(76)
def test_a_generator_of_the_loaders_own_goes_on_from_pass_to_pass() -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(range(LENGTH), 1, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH, generator=generator))

    plain = make()
    expected = [[int(batch) for batch in plain] for _ in range(2)]
    stream = open_stream(make())
    assert [[n for window in read(stream, passes=1) for (n,) in window] for _ in range(2)] == expected


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


TENSORS = TensorDataset(torch.arange(LENGTH))


NOT_KNOWN: dict[str, Callable[[], Any]] = {
    "own collate_fn": lambda: DataLoader(TENSORS, 1, collate_fn=lambda samples: samples),
    "own sampler, workers": lambda: DataLoader(TENSORS, 1, sampler=Order(LENGTH), num_workers=1),
    "own sampler in batches": lambda: DataLoader(TENSORS, batch_sampler=BatchSampler(Order(LENGTH), 1, False)),
    "iterable in this process": lambda: DataLoader(Numbers(), 1),
    "training's generator": lambda: DataLoader(
        TENSORS, 1, sampler=RandomSampler(TENSORS, num_samples=20, generator=torch.default_generator)
    ),
}


@pytest.mark.parametrize("name", list(NOT_KNOWN))
def test_nothing_is_taken_for_known_that_could_draw_later(name: str) -> None:
    assert not draws_at_start_only(NOT_KNOWN[name]())


@pytest.mark.pitfall(76)
def test_an_order_drawn_in_parts_from_trainings_generator_is_kept_apart_too() -> None:
    before = global_states()
    assert len(read(open_stream(NOT_KNOWN["training's generator"]()), passes=1)) == 10
    assert global_states() == before
