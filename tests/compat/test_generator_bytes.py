"""The bytes of the global generators, beside what `random` and numpy say of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dream_trainer.compat import generator_bytes
from dream_trainer.compat.generator_bytes import (
    as_tensor,
    as_tuple,
    numpy_global,
    numpy_mark,
    numpy_memory,
    python_mark,
    python_state,
    set_python_state,
)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = random.getstate()
    random.seed(5)
    yield
    random.setstate(before)


@pytest.fixture(params=["by its memory", "by getstate"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generator_bytes._memory is not None  # in every CPython that is supported
    if request.param == "by getstate":
        monkeypatch.setattr(generator_bytes, "_memory", None)


PYTHON_DRAWS: list[Callable[[], Any]] = [
    random.random,
    lambda: random.getrandbits(1),
    lambda: random.gauss(0, 1),
    lambda: [random.getrandbits(32) for _ in range(624)],  # comes back to the position it began at
]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("draw", PYTHON_DRAWS)
@pytest.mark.parametrize("drawn_before", [0, 1, 311, 700])
def test_pythons_generator_is_put_back_and_every_draw_is_seen(draw: Callable[[], Any], drawn_before: int) -> None:
    for _ in range(drawn_before):
        random.random()
    before, expected = python_state(), random.getstate()
    assert as_tuple(before) == expected
    assert python_state() == before
    mark = python_mark()
    drawn = draw()
    assert python_state() != before
    assert python_mark() != mark
    set_python_state(before)
    assert python_mark() == mark
    assert random.getstate() == expected
    assert draw() == drawn


@pytest.mark.usefixtures("way")
def test_the_second_of_a_pair_of_normal_numbers_is_kept_and_its_draw_seen() -> None:
    random.gauss(0, 1)
    before, mark, expected = python_state(), python_mark(), random.getstate()
    assert as_tuple(before) == expected
    second = random.gauss(0, 1)
    assert python_state() != before
    assert python_mark() != mark
    random.random()
    set_python_state(before)
    assert random.gauss(0, 1) == second


def test_the_bytes_of_numpys_generator_change_with_every_draw_and_hold_its_whole_state() -> None:
    bit_generator = np.random.MT19937(3)
    memory, random_state = numpy_memory(bit_generator), np.random.RandomState(bit_generator)
    mark = numpy_mark(memory)
    before, mark_before = memory.raw, mark.raw
    first = random_state.random_sample(312).tolist()  # 624 words: the position it began at
    assert memory.raw != before
    assert mark.raw != mark_before
    memory.raw = before
    assert mark.raw == mark_before
    assert random_state.random_sample(312).tolist() == first


TORCH_DRAWS: list[Callable[[], Any]] = [
    lambda: torch.rand(1),
    lambda: torch.randn(1),
    lambda: torch.randn(1, dtype=torch.float64),
    lambda: torch.randperm(3),
    lambda: torch.rand(624),
]


@pytest.fixture(params=["by its memory", "by get_state"])
def torchs_state(request: pytest.FixtureRequest) -> Any:
    memory = generator_bytes.torch_state
    assert not isinstance(memory, generator_bytes._TorchState)  # in every PyTorch that is supported
    return memory if request.param == "by its memory" else generator_bytes._TorchState()


@pytest.mark.parametrize("draw", TORCH_DRAWS)
@pytest.mark.parametrize("drawn_before", [0, 1, 311, 700])
def test_torchs_generator_is_put_back_and_every_draw_is_seen(
    draw: Callable[[], Tensor], drawn_before: int, torchs_state: Any
) -> None:
    torch.manual_seed(5)
    torch.randn(drawn_before)
    torch.randn(drawn_before % 2)  # holds the second of a pair, or not
    before, expected = torchs_state.raw, torch.get_rng_state()
    assert torchs_state.raw == before
    drawn = draw()
    assert torchs_state.raw != before
    torchs_state.raw = before
    assert torch.equal(torch.get_rng_state(), expected)
    assert torch.equal(draw(), drawn)


def test_the_bytes_of_torchs_generator_become_what_a_checkpoint_keeps() -> None:
    torch.manual_seed(6)
    torch.randn(1)
    assert torch.equal(as_tensor(generator_bytes.torch_state.raw), torch.get_rng_state())


def test_numpys_generator_is_the_one_of_its_functions() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(other := np.random.MT19937(3))
        assert numpy_global(np)._bit_generator is np.random.get_bit_generator() is other
    finally:
        np.random.set_bit_generator(before)
