"""Documents of a stream packed into rows: each block of consecutive documents of a lane by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dream_trainer.checks import check_count
from dream_trainer.data.ordered import OrderedDataset
from dream_trainer.data.packing.packed_rows import PackedRows
from dream_trainer.data.transforms import SKIPPED, Item, StageCalls, Transform, part_number
from dream_trainer.errors import DataError


@dataclass(frozen=True)
class Pack(Transform):
    """Packs documents into rows of `row_length` tokens, as `PackedRows` does; later transforms see rows.

    A document is an array, tensor or list of token ids, or a mapping that has them under `field`: tokenise it by a
    `Map` before. `documents` consecutive documents of a lane are in memory together and packed among themselves; their
    rows come in random order. The more there are, the fuller rows are, and the more a resume reads again.

    Attributes:
        row_length: Tokens in a row.
        documents: Documents that are packed together.
        method: "best_fit" or "concatenate"; see PackedRows, as the others.
        pad_id: Token id of padding.
        field: Name of the token ids in documents that are mappings.
        vocabulary_size: Number of token ids; with it, each is checked.

    Raises:
        DataError: `row_length` or `documents` is not positive.
    """

    row_length: int
    documents: int = 1024
    method: Literal["best_fit", "concatenate"] = "best_fit"
    pad_id: int = 0
    field: str = "tokens"
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        check_count("Pack: row_length", self.row_length, hint="Give the number of tokens in a row.")
        check_count("Pack: documents", self.documents, hint="Give the number of documents packed together.")

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.documents

    def over(self, items: Iterator[Item], calls: StageCalls) -> Iterator[Item]:
        while documents := list(islice(items, self.documents)):
            lengths = [calls(self._length, item) for item in documents]
            known = [place for place, length in enumerate(lengths) if length is not SKIPPED]
            if known:
                first = documents[known[0]]
                rows = self._rows([documents[place].value for place in known], [lengths[place] for place in known])
                rows.begin(calls.seed(first), None)
                for number in range(len(rows)):
                    yield Item(self._row(rows, number, first), part_number(first, number), first.shard, first.index)

    def _length(self, document: Any) -> int:
        return len(document[self.field] if isinstance(document, Mapping) else document)

    def _rows(self, documents: Sequence[Any], lengths: Sequence[int]) -> PackedRows:
        options = {name: getattr(self, name) for name in ("method", "pad_id", "field", "vocabulary_size")}
        listed = ListedDocuments(documents, np.asarray(lengths))
        return PackedRows(listed, self.row_length, block_size=len(documents), **options)

    def _row(self, rows: PackedRows, number: int, first: Item) -> dict[str, Any]:
        try:
            return rows[number]
        except DataError as error:
            raise DataError(f"packing the documents from sample {first.index} of {first.shard} on: {error}") from error


class ListedDocuments(OrderedDataset):
    def __init__(self, documents: Sequence[Any], lengths: NDArray[Any]) -> None:
        self._documents = documents
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, position: int) -> Any:
        return self._documents[position]

    def lengths(self, first: int, last: int) -> NDArray[Any]:
        return self._lengths[first:last]

    def begin(self, seed: int, state: dict[str, Any] | None) -> None:
        """There is one order only."""

    def state_at(self, position: int, mark: Any = None) -> dict[str, Any]:
        return {}
