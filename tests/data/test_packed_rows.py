"""Packed rows: what is in them, that nothing is lost or comes twice, and what is refused."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.api import IGNORED, PADDING, DataError, Mixture, OrderedDataset, PackedRows, Stage, WithLengths
from tests.data.documents import APART, NumberedDocuments, document, web_like_lengths

LENGTH = 64
METHODS: list[Literal["best_fit", "concatenate"]] = ["best_fit", "concatenate"]


def real_tokens(rows: PackedRows, count: int | None = None) -> list[NDArray[Any]]:
    """The tokens that are no padding, of each row or of the first ones."""
    found = map(rows.__getitem__, range(len(rows) if count is None else count))
    return [row["tokens"][row["documents"] != PADDING].numpy() for row in found]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block_size", [None, 7, 1000])
def test_a_pass_has_every_token_once(method: Literal["best_fit", "concatenate"], block_size: int | None) -> None:
    lengths = [0, *web_like_lengths(400), 1, 3 * LENGTH]
    rows = PackedRows(NumberedDocuments(lengths), LENGTH, method=method, block_size=block_size)
    expected = [token for number, length in enumerate(lengths) for token in document(number, length).tolist()]
    found = np.concatenate(real_tokens(rows)).tolist()
    assert len(found) == sum(lengths)
    assert sorted(found) == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_token_predicts_its_next_one_also_where_the_row_ends(method: Literal["best_fit", "concatenate"]) -> None:
    lengths = web_like_lengths(300)
    rows = PackedRows(NumberedDocuments(lengths), LENGTH, method=method, pad_id=5)
    num_labels = num_cut = 0
    for position in range(len(rows)):
        row = {name: values.tolist() for name, values in rows[position].items()}
        assert all(len(values) == LENGTH for values in row.values())
        for at, (token, label, piece) in enumerate(zip(row["tokens"], row["labels"], row["documents"], strict=True)):
            if piece == -1:
                assert (token, label, row["weights"][at], row["positions"][at]) == (5, -100, 0.0, 0)
                continue
            number, index = divmod(token, APART)
            is_last = index == lengths[number] - 1
            assert label == (-100 if is_last else token + 1)
            assert row["weights"][at] == (0.0 if is_last else 1.0)
            begins = at == 0 or row["documents"][at - 1] != piece
            assert row["positions"][at] == (0 if begins else row["positions"][at - 1] + 1)
            assert piece == (0 if at == 0 else row["documents"][at - 1] + begins)
            num_labels += not is_last
            num_cut += at == LENGTH - 1 and not is_last
    assert num_labels == sum(lengths) - len(lengths)
    assert num_cut > 0


class Answers(NumberedDocuments):
    """Documents whose tokens after the second have a weight."""

    def __init__(self, lengths: Any, weight: float) -> None:
        super().__init__(lengths)
        self.weight = weight

    def __getitem__(self, position: int) -> Any:
        ids = super().__getitem__(position)
        return {"input_ids": torch.from_numpy(ids), "weights": [0.0, 0.0, *[self.weight] * (len(ids) - 2)]}


def test_documents_may_be_mappings_with_weights_for_each_token() -> None:
    row = PackedRows(Answers([5, 6], 0.5), 12, field="input_ids")[0]
    assert row["documents"].tolist() == [0] * 6 + [1] * 5 + [-1]
    assert row["labels"].tolist() == [-100, *range(100002, 100006), -100, -100, 2, 3, 4, -100, -100]
    assert row["weights"].tolist() == [0, 0.5, 0.5, 0.5, 0.5, 0, 0, 0.5, 0.5, 0.5, 0, 0]
    with pytest.raises(DataError, match=r"has no 'tokens', but 'input_ids', 'weights'\. Name its token ids in field="):
        PackedRows(Answers([5, 6], 0.5), 12)[0]


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(DataError, match=rf"document at position 0 has a weight of {weight}"):
        PackedRows(Answers([5], weight), 12, field="input_ids")[0]


def test_another_pass_has_its_rows_in_another_order() -> None:
    rows = PackedRows(NumberedDocuments(web_like_lengths(300)), LENGTH)
    first = np.concatenate(real_tokens(rows)).tolist()
    rows.begin(0, None)
    rows.set_epoch(1)
    second = np.concatenate(real_tokens(rows)).tolist()
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("is_endless", [False, True])
def test_what_state_at_says_goes_on_at_that_row(is_endless: bool) -> None:
    lengths = web_like_lengths(200)

    def rows() -> PackedRows:
        return PackedRows(NumberedDocuments(lengths, is_endless), LENGTH, block_size=30)

    whole = rows()
    whole.begin(3, None)
    expected = [whole[position]["tokens"] for position in range(150)]
    marks: dict[int, Any] = {0: None}
    for position in range(150):
        _ = whole[position]
        marks[position + 1] = whole.mark()
    blocks = set()
    for position in range(150):
        for mark in (marks[position], marks[max(0, position - 70)]):
            state = whole.state_at(position, mark)
            resumed = rows()
            resumed.begin(3, state)
            assert torch.equal(resumed[position]["tokens"], expected[position])
            assert torch.equal(resumed[149]["tokens"], expected[149])
            assert resumed.state_at(position) == state
            assert len(resumed) == len(whole)
        blocks.add(whole.state_at(position, marks[position])["block"])
    assert len(blocks) > 3  # the newest mark moves on, or a resume would pack all from the start


class Shapeless(OrderedDataset):
    """An ordered dataset without lengths."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, position: int) -> Tensor:
        return torch.arange(3)

    def begin(self, seed: int, state: dict[str, Any] | None) -> None: ...

    def state_at(self, position: int, mark: Any = None) -> dict[str, Any]:
        return {}


def test_documents_without_order_without_lengths_and_without_number_are_refused() -> None:
    with pytest.raises(DataError, match=r"TensorDataset has no order, which rows need\. Give Mixture"):
        PackedRows(TensorDataset(torch.ones(3)), 4)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"Shapeless has no `lengths\(first, last\)`.*dream-trainer data tokenize"):
        PackedRows(Shapeless(), 4)
    with pytest.raises(DataError, match=r"The documents \(NumberedDocuments\) are none"):
        PackedRows(NumberedDocuments([]), 4)
    for is_endless in (False, True):
        with pytest.raises(DataError, match="The first 2 documents have no token|documents have no token"):
            PackedRows(NumberedDocuments([0, 0], is_endless), 4)[0]
        with pytest.raises((DataError, IndexError), match=r"have no token|Row 0 of 0"):
            PackedRows(NumberedDocuments([0, 0], is_endless), 4, block_size=2)[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"row_length": 0}, "row_length=0 is not a positive integer"),
        ({"pad_id": 256, "vocabulary_size": 256}, r"pad_id=256 is no token id\. Give one from 0 to 255"),
        ({"method": "first_fit"}, "method='first_fit' is unknown. Use 'best_fit' or 'concatenate'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        PackedRows(NumberedDocuments([3]), **{"row_length": 4, **options})


class Lying(NumberedDocuments):
    """The document at position 2 is longer than it said."""

    def __getitem__(self, position: int) -> Any:
        found = super().__getitem__(position)
        return np.append(found, 7) if position == 2 else found


def test_a_document_that_is_not_what_its_length_said_is_named_at_its_row() -> None:
    rows = PackedRows(Lying([3, 3, 3]), 9)
    with pytest.raises(DataError, match=r"position 2 has 3 tokens by the lengths.*was loaded with shape \(4,\)"):
        rows[0]


def test_lengths_and_tokens_that_can_not_be_are_named() -> None:
    class Broken(NumberedDocuments):
        def __init__(self, found: Any) -> None:
            super().__init__([3])
            self.found = found

        def lengths(self, first: int, last: int) -> Any:
            return self.found

    for found, says in (
        (np.array([-2]), "from -2 on, not .* integers of 0 or more"),
        (np.array([1, 2]), r"gave int64 of shape \(2,\)"),
        (np.array([1.5]), "gave float64 of shape"),
    ):
        with pytest.raises(DataError, match=says):
            PackedRows(Broken(found), 4, block_size=1)[0]
    with pytest.raises(DataError, match=r"token ids from 0 to 2, outside of vocabulary_size=2"):
        PackedRows(NumberedDocuments([3]), 4, vocabulary_size=2)[0]


def test_going_on_with_rows_made_in_another_way_is_refused_and_says_what_is_other() -> None:
    lengths = web_like_lengths(100)
    state = PackedRows(NumberedDocuments(lengths), 32).state_at(0)
    with pytest.raises(DataError, match=r"row_length was 32 and is 64, method was 'best_fit' and is 'concatenate'"):
        PackedRows(NumberedDocuments(lengths), 64, method="concatenate").begin(0, state)


def two_sources(**options: Any) -> Mixture:
    """From document 300 on of the second; each token is there once."""
    tokens = [np.arange(20 * number, 20 * number + 20) for number in range(1000)]
    sources = {"a": WithLengths(tokens[:500], [20] * 500), "b": WithLengths(tokens[500:], [20] * 500)}
    return Mixture(sources, {"a": 1}, stages=[Stage(at=300, weights={"b": 1})], seed=5, **options)


@pytest.mark.parametrize("num_samples", [None, 700])
def test_a_stage_of_a_mixture_within_a_block_begins_at_its_place(num_samples: int | None) -> None:
    rows = PackedRows(two_sources(num_samples=num_samples), row_length=100, block_size=700)
    rows.begin(0, None)
    found = np.array([[bool(part.min() >= 10_000), bool(part.max() >= 10_000)] for part in real_tokens(rows, 140)])
    np.testing.assert_array_equal(found, np.repeat([[False, False], [True, True]], [60, 80], axis=0))
    assert num_samples is None or len(rows) == 140


def test_parts_of_a_block_lose_nothing_and_are_those_of_a_resume() -> None:
    def new() -> PackedRows:
        rows = PackedRows(two_sources(max_epochs={"a": 1, "b": 1}, num_samples=800), 96, block_size=800)
        rows.begin(1, None)
        return rows

    rows = new()
    tokens = np.concatenate(real_tokens(rows)).tolist()
    assert len(tokens) == len(set(tokens)) == 800 * 20
    assert set(range(10_000, 20_000)) < set(tokens)
    again = new()
    again.begin(1, rows.state_at(80, rows.mark()))
    for number in range(80, len(rows)):
        assert (rows[number]["tokens"] == again[number]["tokens"]).all()
    assert any((rows[number]["labels"] == IGNORED).any() for number in range(len(rows)))
