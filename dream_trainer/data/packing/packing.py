"""Assigns parts of documents to rows, only by lengths. Longer documents are first cut into pieces of
`row_length` tokens; the rest of one, and each shorter document, is a piece too."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROW_BITS = 32


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows as pieces of documents. Row `r` consists of the pieces `row_starts[r]` to `row_starts[r + 1]`, in order."""

    row_starts: NDArray[np.int64]  # first piece of each row, and the number of pieces: shape `(rows + 1,)`
    documents: NDArray[np.int64]  # whose piece it is, as a number in the lengths that were packed: shape `(pieces,)`
    starts: NDArray[np.int64]  # the document's token that the piece begins with: shape `(pieces,)`
    sizes: NDArray[np.int64]  # tokens of the piece: shape `(pieces,)`

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.sizes.sum())

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """The pieces of a row as (document, start, size)."""
        part = slice(int(self.row_starts[row]), int(self.row_starts[row + 1]))
        return list(
            zip(self.documents[part].tolist(), self.starts[part].tolist(), self.sizes[part].tolist(), strict=True)
        )

    def row_tokens(self) -> NDArray[np.int64]:
        before = np.concatenate(([0], np.cumsum(self.sizes)))
        return np.diff(before[self.row_starts])


def joined(plans: Sequence[RowPlan], first_documents: Sequence[int]) -> RowPlan:
    pieces = accumulate((len(plan.sizes) for plan in plans[:-1]), initial=0)
    starts = [plan.row_starts[:-1] + before for plan, before in zip(plans, pieces, strict=True)]
    num_pieces = sum(len(plan.sizes) for plan in plans)
    return RowPlan(
        np.concatenate([*starts, np.array([num_pieces])]),
        np.concatenate([plan.documents + first for plan, first in zip(plans, first_documents, strict=True)]),
        np.concatenate([plan.starts for plan in plans]),
        np.concatenate([plan.sizes for plan in plans]),
    )


def pack_best_fit(lengths: NDArray[Any], row_length: int) -> RowPlan:
    """Packs by best fit, from the longest piece to the shortest; takes about a microsecond per piece."""
    documents, starts, sizes = _cut(lengths, row_length)
    by_size = np.argsort(-sizes, kind="stable")
    rows, num_rows = [], 0
    # (room, row) in one integer each, rising: the first that is not below (size, 0) is the fullest row with room.
    open_rows: list[int] = []
    for size in sizes[by_size].tolist():
        at = bisect_left(open_rows, size << _ROW_BITS)
        if at == len(open_rows):
            row, room = num_rows, row_length - size
            num_rows += 1
        else:
            room, row = divmod(open_rows.pop(at), 1 << _ROW_BITS)
            room -= size
        rows.append(row)
        if room:
            insort(open_rows, room << _ROW_BITS | row)
    row_of_piece = np.asarray(rows, dtype=np.int64)
    order = by_size[np.argsort(row_of_piece, kind="stable")]
    row_starts = np.searchsorted(np.sort(row_of_piece), np.arange(num_rows + 1))
    return RowPlan(row_starts, documents[order], starts[order], sizes[order])


def pack_concatenated(lengths: NDArray[Any], row_length: int) -> RowPlan:
    """Puts documents one behind the other and cuts where a row ends; only the last row can have room left."""
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    pieces = np.union1d(begins[np.asarray(lengths) > 0], np.arange(0, total, row_length))
    documents = np.searchsorted(ends, pieces, side="right")
    num_rows = -(-total // row_length)
    row_starts = np.searchsorted(pieces, np.arange(num_rows + 1) * row_length)
    sizes = np.diff(np.append(pieces, total))
    return RowPlan(row_starts, documents, pieces - begins[documents], sizes)


def pack_one_by_one(lengths: NDArray[Any], row_length: int) -> RowPlan:
    """Gives each piece a separate row, longest rows first."""
    documents, starts, sizes = _cut(lengths, row_length)
    order = np.argsort(-sizes, kind="stable")
    return RowPlan(np.arange(len(sizes) + 1), documents[order], starts[order], sizes[order])


def _cut(lengths: NDArray[Any], row_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    lengths = np.asarray(lengths, dtype=np.int64)
    counts = -(-lengths // row_length)
    documents = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = number * row_length
    return documents, starts, np.minimum(lengths[documents] - starts, row_length)
