"""Rows of documents' tokens, with the label and the document of each token. Rows are made block by block, only from the
block's documents and by their lengths, so a place is a block's number and a count of rows. PackedRows fills
its rows; PaddedRows makes one row per document, and rows of like length share a step."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dream_trainer.checks import check_count, refuse
from dream_trainer.data.ordered import ENDLESS, OrderedDataset
from dream_trainer.data.sample_count import IGNORED as IGNORED
from dream_trainer.data.sampler import random_order
from dream_trainer.distributed.seeds import hash_seed
from dream_trainer.errors import DataError

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

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """The pieces of a row as (document, start, size)."""
        part = slice(int(self.row_starts[row]), int(self.row_starts[row + 1]))
        return list(
            zip(self.documents[part].tolist(), self.starts[part].tolist(), self.sizes[part].tolist(), strict=True)
        )


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


PADDING = -1  # the document number of a row's padding

_PACKERS = {"best_fit": pack_best_fit, "concatenate": pack_concatenated}

_FEWEST_ROWS = 512  # the last rows of a block stay partly empty: 2 of 512 are 0.4%
# The rows of a long document are spread over its block only, so a block is of many documents, if that is not too much.
_FEWEST_DOCUMENTS, _MOST_DOCUMENTS = 1024, 65536
_MOST_ROWS = 8192
_EMPTY_BLOCKS = 1000
# Parts of a block have at least about this number of rows: the last rows of each stay partly empty too.
_FEWEST_ROWS_OF_PART = 32


@runtime_checkable
class HasLengths(Protocol):
    def lengths(self, first: int, last: int, /) -> NDArray[Any]:
        """Tokens of the documents at positions `first` to `last` (exclusive), shape `(last - first,)`."""
        ...


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    first_row: int  # position of its first row
    plan: RowPlan
    order: NDArray[np.int64]  # the rows of `plan` in the order they come
    lengths: NDArray[Any]

    @property
    def end(self) -> int:
        return self.first_row + self.plan.num_rows


@dataclass(eq=False, repr=False)
class DocumentRows(OrderedDataset):
    """Rows of documents' tokens; a mapping's `weights` say how much predicting each token counts."""

    documents: OrderedDataset
    row_length: int
    _: KW_ONLY
    pad_id: int = 0
    block_size: int | None = None
    field: str = "tokens"
    vocabulary_size: int | None = None

    _own_option: ClassVar[str]  # which decides each row's tokens, besides the documents and the shared options

    def __post_init__(self) -> None:
        _check_documents(self.documents)
        check_count("row_length", self.row_length, hint="Give the number of tokens in a row.")
        if self.block_size is not None:
            hint = "Give the number of documents whose rows are made together."
            check_count("block_size", self.block_size, hint=hint)
        last = (torch.iinfo(torch.int64).max if self.vocabulary_size is None else self.vocabulary_size) - 1
        if not isinstance(self.pad_id, int) or not 0 <= self.pad_id <= last:
            raise DataError(
                f"pad_id={self.pad_id!r} is no token id. Give one from 0 to {last}; no label ever is padding."
            )
        self._seed = self._epoch = 0
        self._counted: tuple[Any, list[int]] | None = None
        self._state: dict[str, Any] | None = None
        self._anchor: tuple[int, int] | None = None
        self._per_block: int | None = None
        self._block: _Block | None = None

    @property
    def source(self) -> OrderedDataset:
        return self.documents

    @property
    def may_change(self) -> bool:
        return self.documents.may_change

    @abstractmethod
    def _pack(self, lengths: NDArray[Any]) -> RowPlan:
        """The rows of a block."""

    @abstractmethod
    def _arrange(self, plan: RowPlan, first_row: int, seed: int) -> NDArray[np.int64]:
        """The order of a block's rows."""

    def __len__(self) -> int:
        """Rows of a pass, counted from all lengths at about 1 us each; ENDLESS if the documents never end."""
        return ENDLESS if self._is_endless else self._first_rows()[-1]

    def begin(self, seed: int, state: dict[str, Any] | None) -> None:
        if state is not None:
            self._refuse_other_rows(state["rows"])
        self.documents.begin(seed, None if state is None else state["documents"])
        self._seed, self._epoch = seed, 0
        self._state, self._anchor, self._block = state, None, None
        self._per_block = None if state is None else state["block_size"]

    def set_epoch(self, epoch: int) -> None:
        self.documents.set_epoch(epoch)
        self._epoch = epoch
        self._anchor = self._block = None

    def state_at(self, position: int, mark: Any = None) -> dict[str, Any]:
        number, first_row = self._anchor_at(position, mark)
        begun = self._begun(position, mark)
        return {
            "rows": self._rows,
            "block_size": self.documents_per_block,
            "block": number,
            "first_row": first_row,
            "position": position,
            "begun": begun,
            "documents": self.documents.state_at(begun),
        }

    def mark(self) -> Any:
        block = self._block
        return None if block is None else (block.number, block.first_row, block.plan.num_rows)

    def changes_at(self, position: int, mark: Any = None) -> bool:
        has_changed = self.documents.changes_at(self._begun(position, mark))
        if has_changed:
            self._block = self._counted = None
        return has_changed

    def numbers_at(self, position: int, mark: Any = None) -> Mapping[str, float]:
        number, first_row = self._anchor_at(position, mark)
        document = number * self.documents_per_block
        if mark is not None:
            share = (position - first_row) / mark[2] if number == mark[0] else 0.0
            of_block = min(self.documents_per_block, len(self.documents) - document)
            document += round(share * of_block)
        return self.documents.numbers_at(document)

    @property
    def documents_per_block(self) -> int:
        if self._per_block is None:
            self._per_block = self.block_size or self._fitting_block_size()
        return self._per_block

    @property
    def _is_endless(self) -> bool:
        return len(self.documents) == ENDLESS

    @property
    def _rows(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "row_length": self.row_length,
            "block_size": self.block_size,
            self._own_option: vars(self)[self._own_option],
        }

    def _start(self) -> tuple[int, int]:
        """The block that reading begins with, and the position of its first row."""
        if self._anchor is None:
            state = self._state
            if state is None:
                self._anchor = 0, 0
            elif state["block"] * self.documents_per_block >= self.documents.first_position:
                self._anchor = state["block"], state["first_row"]
            else:  # other documents come now: of the block that was begun no more can be read
                self._anchor = -(-state["begun"] // self.documents_per_block), state["position"]
        return self._anchor

    def _anchor_at(self, position: int, mark: Any) -> tuple[int, int]:
        """The last block that is known to begin at or before `position`, and the position of its first row."""
        if mark is None or mark[1] > position:
            return self._start()
        number, first_row, num_rows = mark
        return (number, first_row) if position < first_row + num_rows else (number + 1, first_row + num_rows)

    def _begun(self, position: int, mark: Any) -> int:
        """Documents of the blocks that were begun before `position`."""
        if mark is not None and mark[1] < position < mark[1] + mark[2]:
            return int(mark[0] + 1) * self.documents_per_block
        if not self._is_endless and position >= len(self):
            return len(self.documents)
        block = self._block_at(position)
        return (block.number + (block.first_row < position)) * self.documents_per_block

    def _block_at(self, position: int) -> _Block:
        block = self._block
        if block is None or not block.first_row <= position < block.end:
            block = self._block = self._find(position)
        return block

    def _find(self, position: int) -> _Block:
        number, first_row = self._start()
        if position < first_row:
            raise IndexError(f"Row {position} lies before row {first_row}, where this pass was resumed.")
        if not self._is_endless:
            first_rows = self._first_rows()
            if position >= first_rows[-1]:
                raise IndexError(f"Row {position} of {first_rows[-1]}.")
            found = bisect_right(first_rows, position) - 1
            return self._load_block(number + found, first_rows[found])
        if self._block is not None and self._block.end <= position:
            number, first_row = self._block.number + 1, self._block.end
        num_empty, size = 0, self.documents_per_block
        while (block := self._load_block(number, first_row)).end <= position:
            num_empty = 0 if block.plan.num_rows else num_empty + 1
            if num_empty == _EMPTY_BLOCKS:
                raise DataError(
                    f"The {_EMPTY_BLOCKS * size} documents up to position {(number + 1) * size} "
                    "have no token. Look at their source, or at the lengths it tells."
                )
            number, first_row = number + 1, block.end
        return block

    def _load_block(self, number: int, first_row: int) -> _Block:
        lengths = self._lengths(number)
        firsts, plans = self._plan(number, lengths)
        order, rows = [], 0
        for part, plan in enumerate(plans):
            seed = hash_seed(b"rows", self._seed, self._epoch, number, *((part,) if part else ()))
            order.append(rows + self._arrange(plan, first_row + rows, seed))
            rows += plan.num_rows
        plan = joined(plans, firsts) if len(plans) > 1 else plans[0]
        return _Block(number, first_row, plan, np.concatenate(order), lengths)

    def _plan(self, number: int, lengths: NDArray[Any]) -> tuple[list[int], list[RowPlan]]:
        """The parts of a block: the first document of each, and its rows."""
        first = number * self.documents_per_block
        tokens = np.cumsum(lengths)
        firsts = [0]
        for position in self.documents.stages_within(first, first + len(lengths)):
            before = int(tokens[position - first - 1])
            of_part = before - (int(tokens[firsts[-1] - 1]) if firsts[-1] else 0)
            behind = int(tokens[-1]) - before
            if min(of_part, behind) >= _FEWEST_ROWS_OF_PART * self.row_length:
                firsts.append(position - first)
        return firsts, [self._pack(lengths[begin:end]) for begin, end in pairwise([*firsts, len(lengths)])]

    def _first_rows(self) -> list[int]:
        """Positions of the first row of each block from the anchor on, and of the pass's end."""
        number, first_row = self._start()
        documents = len(self.documents), self.documents.state_at(number * self.documents_per_block)
        of = self._seed, self._epoch, self.documents_per_block, number, first_row, documents
        if self._counted is None or self._counted[0] != of:
            num_blocks = -(-len(self.documents) // self.documents_per_block)
            blocks = (self._plan(block, self._lengths(block))[1] for block in range(number, num_blocks))
            counts = (sum(plan.num_rows for plan in plans) for plans in blocks)
            self._counted = of, list(accumulate(counts, initial=first_row))
        return self._counted[1]

    def _lengths(self, block: int) -> NDArray[Any]:
        first = block * self.documents_per_block
        last = min(first + self.documents_per_block, len(self.documents))
        documents: Any = self.documents
        lengths: NDArray[Any] = np.asarray(documents.lengths(first, last))
        are_counts = lengths.shape == (last - first,) and lengths.dtype.kind in "iu" and lengths.min(initial=0) >= 0
        if not are_counts:
            raise DataError(
                f"lengths({first}, {last}) of the documents ({type(self.documents).__name__}) gave {lengths.dtype} of "
                f"shape {lengths.shape}, from {lengths.min(initial=0)} on, not {last - first} integers of 0 or more."
            )
        return lengths

    def _fitting_block_size(self) -> int:
        documents: Any = self.documents
        judged = min(len(documents), 4096)
        mean = float(np.mean(documents.lengths(0, judged)))
        if mean == 0.0:
            raise DataError(
                f"The first {judged} documents have no token. Look at their source, or at the lengths it tells."
            )
        documents_per_row = self.row_length / mean
        spread = min(_FEWEST_DOCUMENTS, round(_MOST_ROWS * documents_per_row))
        return min(max(round(_FEWEST_ROWS * documents_per_row), spread, 1), _MOST_DOCUMENTS)

    def _refuse_other_rows(self, saved: dict[str, Any]) -> None:
        other = [
            f"{name} was {saved.get(name)!r} and is {value!r}"
            for name, value in self._rows.items()
            if saved.get(name) != value
        ]
        if other:
            raise DataError(
                f"The run resumes with rows made in another way: {', '.join(other)}. Make them as before, or start a "
                "new run from the checkpoint's weights."
            )

    def _build_row(self, position: int, room: int | None) -> dict[str, Tensor]:
        """The row at `position`, with `room` for tokens; None makes it as long as its tokens."""
        block = self._block_at(position)
        pieces = block.plan.pieces(int(block.order[position - block.first_row]))
        sizes = [size for _, _, size in pieces]
        length = sum(sizes)
        tokens = np.full(room or length, self.pad_id, dtype=np.int64)
        labels = np.full(room or length, IGNORED, dtype=np.int64)
        weights = np.zeros(room or length, dtype=np.float32)
        at = 0
        for document, start, size in pieces:
            ids, counts = self._load(block.number * self.documents_per_block + document, int(block.lengths[document]))
            tokens[at : at + size] = ids[start : start + size]
            num_labels = min(size, len(ids) - 1 - start)  # a document's last token predicts nothing
            labels[at : at + num_labels] = ids[start + 1 : start + 1 + num_labels]
            weights[at : at + num_labels] = 1.0 if counts is None else counts[start : start + num_labels]
            at += size
        labels[weights == 0.0] = IGNORED
        positions = np.zeros(room or length, dtype=np.int64)
        positions[:length] = np.arange(length) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        documents = np.full(room or length, PADDING, dtype=np.int64)
        documents[:length] = np.repeat(np.arange(len(sizes)), sizes)
        row = {"tokens": tokens, "labels": labels, "positions": positions, "documents": documents, "weights": weights}
        return {name: torch.from_numpy(values) for name, values in row.items()}

    def _load(self, position: int, length: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Token ids of a document, and the weight of each label: of the next token."""
        document, weights = self.documents[position], None
        place = f"The document at position {position}"
        if isinstance(document, Mapping):
            if self.field not in document:
                there = ", ".join(map(repr, document))
                raise DataError(f"{place} has no {self.field!r}, but {there}. Name its token ids in field=.")
            document, weights = document[self.field], document.get("weights")
        ids, wrong = np.asarray(document), None
        if ids.shape != (length,):
            wrong = (
                f"has {length} tokens by the lengths that its rows were planned with, and was loaded with shape "
                f"{ids.shape}. Measure the lengths again, and load a document as the same tokens each time."
            )
        elif length and ids.dtype.kind not in "iu":
            wrong = f"is of {ids.dtype}. Token ids are integers."
        elif length and self.vocabulary_size is not None and not 0 <= ids.min() <= ids.max() < self.vocabulary_size:
            wrong = (
                f"has token ids from {ids.min()} to {ids.max()}, outside of vocabulary_size={self.vocabulary_size}. "
                "Was it made by another tokenizer?"
            )
        if weights is not None:
            weights = np.asarray(weights, dtype=np.float32)
            unusable = weights[~((weights >= 0.0) & (weights < np.inf))]
            if weights.shape != (length,):
                wrong = wrong or f"has {length} tokens and weights of shape {weights.shape}. Give one for each token."
            elif unusable.size:
                wrong = (
                    wrong or f"has a weight of {unusable[0]}. A weight is a finite number, 0 for what is not learned."
                )
        refuse(wrong, f"{place} {wrong}", DataError)
        return ids, None if weights is None else weights[1:]


def _check_documents(documents: object) -> None:
    name = type(documents).__name__
    if not isinstance(documents, OrderedDataset):
        raise DataError(f'{name} has no order, which rows need. Give Mixture({{"name": documents}}).')
    if not isinstance(documents, HasLengths):
        raise DataError(
            f"{name} has no `lengths(first, last)`, by which rows are planned. Write the documents into token files "
            "(`dream-trainer data tokenize`), or give each source its lengths."
        )
    if len(documents) == 0:
        raise DataError(f"The documents ({name}) are none: their length is 0. Check their path, split and filters.")
    documents.lengths(0, 1)  # which names a source that says none


@dataclass(kw_only=True, eq=False, repr=False)
class PackedRows(DocumentRows):
    """Documents packed into rows of `row_length` tokens, in independent blocks.

    Give it to a `DistributedDataLoader`. A row is a dict of tensors of shape `(row_length,)`:

        tokens     int64; `pad_id` in the room that is left.
        labels     int64: the document's next token, even if the row ends before the document; -100 at the document's
                   end, in padding, and for weights of 0.
        positions  int64, from 0 in each piece of a document.
        documents  int64: number of the piece of a document, from 0 in each row; -1 is padding.
        weights    float32: weight of each label, 1 unless the document has weights; 0 without a label.

    Args:
        documents: The documents in their order, such as a `Mixture` of `TokenFile`s. They need lengths.
        row_length: Tokens in a row.
        method: "best_fit" only cuts documents longer than a row, and fills rows to at least 98% if many documents are
            shorter. "concatenate" puts documents one after the other and cuts at each row's end.
        pad_id: Token id of padding.
        block_size: Documents that are packed together; a long document's rows are spread over the block. None for the
            number that fills 512 rows; with long documents 1024, or the number that fills 8192 rows.
        field: Name of the token ids in documents that are mappings.
        vocabulary_size: Number of token ids; with it, each is checked when it is loaded.

    Raises:
        DataError: `documents` have no order, no lengths, or length 0. `method` is unknown, `row_length` or `block_size`
            is not positive, or `pad_id` is not a token id. On loading a row: a document differs from its stated length.
            Its token ids are outside the vocabulary, or its weights negative.
    """

    method: Literal["best_fit", "concatenate"] = "best_fit"

    _own_option = "method"

    def __post_init__(self) -> None:
        if self.method not in _PACKERS:
            raise DataError(f"method={self.method!r} is unknown. Use {' or '.join(map(repr, _PACKERS))}.")
        super().__post_init__()

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self._build_row(position, self.row_length)

    def _pack(self, lengths: NDArray[Any]) -> RowPlan:
        return _PACKERS[self.method](lengths, self.row_length)

    def _arrange(self, plan: RowPlan, first_row: int, seed: int) -> NDArray[np.int64]:
        # Best fit puts the pieces of long documents first, and what was left over last.
        return random_order(plan.num_rows, seed).numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class PaddedRows(DocumentRows):
    """One row per document, ordered so that a global batch holds rows of like length.

    Give it to a `DistributedDataLoader` with `collate_fn=rows.collate`. A row has the format of `PackedRows`, with one
    document and its length. A document longer than `row_length` is cut into several rows. `collate` pads the rows of a
    micro-batch to the longest.

    Args:
        documents: The documents in their order, with lengths, as for `PackedRows`.
        row_length: Tokens of the longest row.
        bucket_size: Rows of like length that come together: the samples of one optimizer step over all ranks.
        pad_id: As in PackedRows, as `field` and `vocabulary_size`.
        block_size: Documents that are sorted by length together. None: 64 buckets' worth.
        multiple_of: A batch's length is rounded up to a multiple of this, which suits kernels.

    Raises:
        DataError: As `PackedRows`; or `bucket_size` or `multiple_of` is not positive.
    """

    bucket_size: int
    multiple_of: int = 1

    _own_option = "bucket_size"

    def __post_init__(self) -> None:
        check_count("bucket_size", self.bucket_size, hint="Give the samples of one optimizer step.")
        check_count("multiple_of", self.multiple_of, hint="Give 1 for any length.")
        if self.block_size is None:
            self.block_size = 64 * self.bucket_size
        super().__post_init__()

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self._build_row(position, None)

    def collate(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Pads rows to the longest, and stacks them: each tensor has the shape `(rows, longest)`."""
        longest = max(len(row["tokens"]) for row in rows)
        shape = len(rows), -(-longest // self.multiple_of) * self.multiple_of
        fill = {"tokens": self.pad_id, "labels": IGNORED, "positions": 0, "documents": PADDING, "weights": 0.0}
        batch = {name: torch.full(shape, fill[name], dtype=values.dtype) for name, values in rows[0].items()}
        for number, row in enumerate(rows):
            for name, values in row.items():
                batch[name][number, : len(values)] = values
        return batch

    def _pack(self, lengths: NDArray[Any]) -> RowPlan:
        return pack_one_by_one(lengths, self.row_length)

    def _arrange(self, plan: RowPlan, first_row: int, seed: int) -> NDArray[np.int64]:
        # The bucket that the block before began is completed by short rows, and the last one begun with short ones: a
        # batch of both is then padded little.
        num_first = min(-first_row % self.bucket_size, plan.num_rows)
        num_buckets, num_last = divmod(plan.num_rows - num_first, self.bucket_size)
        whole = np.arange(num_buckets * self.bucket_size).reshape(num_buckets, self.bucket_size)
        short = np.arange(whole.size, plan.num_rows)
        return np.concatenate(
            (short[num_last:], whole[random_order(num_buckets, seed).numpy()].ravel(), short[:num_last])
        )
