"""Which piece of which document lies in which row: every token in one place, and rows as full as can be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.api import Row, pack_best_fit, pack_concatenated
from tests.data.documents import web_like_lengths

PACKERS = [pack_best_fit, pack_concatenated]
Packer = Callable[[Any, int], list[Row]]


def places(rows: list[Row]) -> list[tuple[int, int]]:
    """Every token of every row, as (document, number of the token)."""
    return [(document, token) for row in rows for document, start, size in row for token in range(start, start + size)]


def tokens_in(row: Row) -> int:
    return sum(size for _, _, size in row)


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 16), st.sampled_from(PACKERS))
def test_tokens_have_one_place_and_no_row_is_empty_or_long(lengths: list[int], row_length: int, pack: Packer) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), row_length)
    expected = [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    assert sorted(places(rows)) == expected
    assert all(0 < tokens_in(row) <= row_length for row in rows)


def best_fit_by_search(lengths: list[int], row_length: int) -> list[list[int]]:
    """Sizes in each row: the textbook's best fit, which looks at every row."""
    pieces = [min(row_length, length - start) for length in lengths for start in range(0, length, row_length)]
    rows: list[list[int]] = []
    for size in sorted(pieces, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= row_length]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            rows.append([size])
    return rows


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=25), st.integers(1, 20))
def test_best_fit_is_the_textbooks(lengths: list[int], row_length: int) -> None:
    rows = pack_best_fit(np.array(lengths, dtype=np.int64), row_length)
    assert sorted(map(tokens_in, rows)) == sorted(map(sum, best_fit_by_search(lengths, row_length)))


@given(st.lists(st.integers(0, 40), max_size=25), st.integers(1, 20))
def test_concatenated_rows_are_the_joined_text_cut_at_every_row(lengths: list[int], row_length: int) -> None:
    rows = pack_concatenated(np.array(lengths, dtype=np.int64), row_length)
    assert places(rows) == [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    assert all(tokens_in(row) == row_length for row in rows[:-1])


def test_only_documents_longer_than_a_row_are_cut_by_best_fit() -> None:
    lengths = web_like_lengths(2000)
    documents = [document for row in pack_best_fit(lengths, 256) for document, _, _ in row]
    assert (np.bincount(documents, minlength=len(lengths)) == -(-lengths // 256)).all()


@pytest.mark.parametrize("row_length", [256, 1024, 4096])
def test_rows_of_a_block_are_98_percent_full(row_length: int) -> None:
    lengths = web_like_lengths(512 * row_length // 90)
    rows = pack_best_fit(lengths, row_length)
    assert sum(map(tokens_in, rows)) >= 0.98 * len(rows) * row_length
