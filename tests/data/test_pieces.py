"""Documents cut into pieces: all of their tokens and labels, in any order; and stages that packed rows do not hide."""

import logging
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests import api

LENGTHS = [7, 64, 1, 200, 33, 96, 0, 128]


def documents(first: int = 0, lengths: list[int] = LENGTHS) -> api.WithLengths:
    """Each token is there once."""
    ends = np.cumsum(lengths) + first
    found = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return api.WithLengths(found, lengths)


def read(rows: api.PackedRows) -> Counter[tuple[int, int]]:
    """(token, label) of every place that holds a document."""
    found: Counter[tuple[int, int]] = Counter()
    for number in range(len(rows)):
        row = rows[number]
        is_real = row["documents"] != api.PADDING
        found.update(zip(row["tokens"][is_real].tolist(), row["labels"][is_real].tolist(), strict=True))
    return found


@pytest.mark.parametrize("length", [1, 32, 50, 1000])
def test_pieces_are_the_documents(length: int) -> None:
    source = documents()
    pieces: Any = pickle.loads(pickle.dumps(api.Pieces(source, length)))
    assert [len(pieces[number]["tokens"]) for number in range(len(pieces))] == pieces.lengths.tolist()
    whole: list[NDArray[Any]] = []
    begun: list[NDArray[Any]] = []
    for number in range(len(pieces)):
        piece = pieces[number]
        begun.append(piece["tokens"])
        if "following" not in piece:
            whole.append(np.concatenate(begun))
            begun.clear()
        else:
            assert len(piece["tokens"]) == length
            assert piece["following"] == piece["tokens"][-1] + 1
    for found, expected in zip(whole, source.dataset, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("length", [32, 50])
def test_every_token_predicts_what_it_does_in_the_whole_document(length: int) -> None:
    def rows(source: Any) -> api.PackedRows:
        return api.PackedRows(api.Mixture({"all": source}, max_epochs={"all": 1}, seed=3), row_length=32)

    assert read(rows(api.Pieces(documents(), length))) == read(rows(documents()))


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


def test_weights_that_count_later_say_so(caplog: pytest.LogCaptureFixture) -> None:
    mixture = two_sources(at=10_000)
    rows = api.PackedRows(mixture, row_length=100, block_size=100)  # 20 rows
    stream = api.train_stream(
        api.DistributedDataLoader(rows, batch_size=3), accumulation=1, dp_rank=0, dp_size=1, seed=0
    )
    stream.seek(api.DataPosition(0, 0, 0), None)
    tokens: list[Any] = []

    def step() -> None:
        window = stream.next_window()
        tokens.extend(row for batch in window.batches for row in batch["tokens"])

    step()
    mixture.set_weights({"b": 1})
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            step()
    assert "count in 6 steps: the 17 rows until then" in caplog.text
    assert [bool((row >= 100_000).any()) for row in tokens] == [False] * 20 + [True] * 7
    stream.close()
