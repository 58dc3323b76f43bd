"""Stages of a mixture that packed rows do not hide."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests import api


def documents(first: int, lengths: list[int]) -> api.WithLengths:
    """Each token is there once."""
    ends = np.cumsum(lengths) + first
    found = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return api.WithLengths(found, lengths)


def two_sources(at: int, **options: Any) -> api.Mixture:
    sources = {"a": documents(0, [20] * 500), "b": documents(100_000, [20] * 500)}
    return api.Mixture(sources, {"a": 1}, stages=[api.Stage(at=at, weights={"b": 1})], seed=5, **options)


@pytest.mark.parametrize("num_samples", [None, 700])
def test_a_stage_within_a_block_begins_at_its_place(num_samples: int | None) -> None:
    rows = api.PackedRows(two_sources(at=300, num_samples=num_samples), row_length=100, block_size=700)
    rows.begin(0, None)
    found = np.array([[bool(part.min() >= 100_000), bool(part.max() >= 100_000)] for part in _real_tokens(rows, 140)])
    np.testing.assert_array_equal(found, np.repeat([[False, False], [True, True]], [60, 80], axis=0))
    assert num_samples is None or len(rows) == 140


def _real_tokens(rows: api.PackedRows, count: int) -> list[NDArray[Any]]:
    return [row["tokens"][row["documents"] != api.PADDING].numpy() for row in map(rows.__getitem__, range(count))]


def test_parts_of_a_block_lose_nothing_and_are_those_of_a_resume() -> None:
    def new() -> api.PackedRows:
        rows = api.PackedRows(two_sources(at=300, max_epochs={"a": 1, "b": 1}, num_samples=800), 96, block_size=800)
        rows.begin(1, None)
        return rows

    rows = new()
    tokens = np.concatenate(_real_tokens(rows, len(rows))).tolist()
    assert len(tokens) == len(set(tokens)) == 800 * 20
    assert set(range(100_000, 110_000)) < set(tokens)
    again = new()
    again.begin(1, rows.state_at(80, rows.mark()))
    for number in range(80, len(rows)):
        assert (rows[number]["tokens"] == again[number]["tokens"]).all()
    assert any((rows[number]["labels"] == api.IGNORED).any() for number in range(len(rows)))
