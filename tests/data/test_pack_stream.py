"""Rows packed from a stream's documents."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api import DataError, Map, Pack
from tests.data.lane_truth import digest, make_source, open_lanes, read_in_parts

ROW, COUNTS = 32, [37, 41, 33, 29]


def document(sample: int) -> list[int]:
    """Up to 40 tokens: the sample's number, and which token of it this is."""
    return [100 * (sample + 1) + token for token in range(1 + sample * 7 % 40)]


def plain(row: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in row.items()}


PACKED: list[Any] = [Map(document), Pack(ROW, documents=16), Map(plain)]


def tokens_of(rows: list[dict[str, list[Any]]]) -> Counter[int]:
    return Counter(
        token for row in rows for token, number in zip(row["tokens"], row["documents"], strict=True) if number >= 0
    )


@pytest.mark.parametrize("method", ["best_fit", "concatenate"])
def test_every_token_of_an_epoch_is_in_one_row_beside_its_label(method: Any, tmp_path: Path) -> None:
    transforms = [Map(document), Pack(ROW, documents=16, method=method), Map(plain)]
    (stream,) = open_lanes(
        make_source("live", tmp_path, [37]), (1, 1, 0), global_batch=1, repeat=False, transforms=transforms
    )
    rows: list[dict[str, list[Any]]] = []
    while (window := stream.next_window()) is not None:
        rows += [row for batch in window.batches for row in batch]
    expected = [token for sample in range(37) for token in document(sample)]
    assert tokens_of(rows) == Counter(expected)
    follows = {one: two for sample in range(37) for one, two in pairwise(document(sample))}
    for row in rows:
        for token, label, number in zip(row["tokens"], row["labels"], row["documents"], strict=True):
            assert label == (follows.get(token, -100) if number >= 0 else -100)


@pytest.mark.parametrize("stop", [1, 4, 7, 15])
def test_rows_go_on_within_a_block_on_other_ranks_and_workers(stop: int, tmp_path: Path) -> None:
    source = make_source("live", tmp_path, COUNTS)
    options: dict[str, Any] = {"lanes": 4, "transforms": PACKED}
    expected = read_in_parts(lambda: source, [((1, 1, 0), stop + 6)], **options)
    found = read_in_parts(lambda: source, [((2, 1, 0), stop), ((1, 4, 2), 3), ((4, 2, 0), 3)], **options)
    assert [digest(step) for step in found] == [digest(step) for step in expected]
    other = read_in_parts(lambda: source, [((1, 1, 0), stop + 6)], seed=8, **options)
    assert [digest(step) for step in other] != [digest(step) for step in expected]


def test_a_document_that_is_none_is_named(tmp_path: Path) -> None:
    source = make_source("live", tmp_path, [20])
    with pytest.raises(DataError, match=r"sample 0 of shard \(0, 20\): TypeError: object of type 'int' has no len"):
        read_in_parts(lambda: source, [((1, 1, 0), 1)], transforms=[Pack(ROW)])
    with pytest.raises(DataError, match=r"sample 0 of shard \(0, 20\) has token ids .* outside of vocabulary_size=50"):
        read_in_parts(lambda: source, [((1, 1, 0), 1)], transforms=[Map(document), Pack(ROW, vocabulary_size=50)])
    with pytest.raises(DataError, match="Pack: row_length=0 is not a positive integer"):
        Pack(0)
