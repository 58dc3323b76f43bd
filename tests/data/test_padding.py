"""Padding: documents as rows of their own lengths, of which a step's are alike."""

from typing import Any

import torch

from tests.api import DistributedDataLoader, PaddedRows
from tests.data.documents import NumberedDocuments, document, web_like_lengths

LONGEST, BUCKET = 200, 16


def padded(lengths: Any, **options: Any) -> PaddedRows:
    return PaddedRows(NumberedDocuments(lengths), LONGEST, **{"bucket_size": BUCKET, **options})


def test_a_pass_has_every_token_once_each_row_from_one_document() -> None:
    lengths = [0, 1, 3 * LONGEST, *web_like_lengths(700)]
    rows = padded(lengths, block_size=100)
    found: list[int] = []
    for position in range(len(rows)):
        row = rows[position]
        assert 0 < len(row["tokens"]) <= LONGEST
        assert row["documents"].unique().tolist() == [0]
        assert row["positions"].tolist() == list(range(len(row["tokens"])))
        found += row["tokens"].tolist()
    assert sorted(found) == [t for number, length in enumerate(lengths) for t in document(number, length).tolist()]


def test_rows_of_a_step_are_of_like_length_and_steps_of_any() -> None:
    rows = padded(web_like_lengths(3000))
    sizes = [len(rows[position]["tokens"]) for position in range(len(rows))]
    steps = [sizes[at : at + BUCKET] for at in range(0, len(sizes), BUCKET)]
    real, bucketed = sum(sizes), sum(max(step) * len(step) for step in steps)
    unsorted = [sizes[at :: len(steps)] for at in range(len(steps))]
    assert real / bucketed > 0.9
    assert real / sum(max(step) * len(step) for step in unsorted) < 0.5
    longest = [max(step) for step in steps]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)


def test_batches_are_as_long_as_their_longest_row_and_say_what_is_padding() -> None:
    rows = padded(web_like_lengths(100), pad_id=9, multiple_of=8)
    loader = DistributedDataLoader(rows, batch_size=4, drop_last=False, collate_fn=rows.collate)
    num_tokens = 0
    for batch in loader:
        real = batch["documents"] == 0
        assert {tuple(values.shape) for values in batch.values()} == {tuple(real.shape)}
        assert real.shape[1] % 8 == 0
        assert real.shape[1] - int(real.sum(1).max()) < 8
        assert (batch["tokens"][~real] == 9).all()
        assert (batch["labels"][~real] == -100).all()
        assert (batch["weights"][~real] == 0).all()
        assert batch["weights"].dtype is torch.float32
        num_tokens += int(real.sum())
    assert num_tokens == web_like_lengths(100).sum()
