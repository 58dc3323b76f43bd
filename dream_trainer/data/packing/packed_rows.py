"""Rows of documents' tokens, with the label and the document of each token. Rows are made block by block, only from the
block's documents and by their lengths, so a place is a block's number and a count of rows. PackedRows fills
its rows; PaddedRows makes one row per document, and rows of like length share a step."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dream_trainer.checks import check_count, refuse
from dream_trainer.data.sample_count import IGNORED
from dream_trainer.data.sampler import ENDLESS, OrderedDataset, random_order
from dream_trainer.distributed.seeds import hash_seed
from dream_trainer.errors import DataError

_ROW_BITS = 32

Piece = tuple[int, int, int]  # of a document: its number, the token that the piece begins with, and its tokens
Row = list[Piece]
Document = tuple[NDArray[Any], NDArray[Any] | None]  # its token ids, and the weight of each label, if there are any


def pack_best_fit(lengths: NDArray[Any], row_length: int, first: int = 0) -> list[Row]:
    """Packs documents, numbered from `first` on, by best fit. Takes about a microsecond per piece."""
    rows: list[Row] = []
    # (room, row) in one integer each, rising: the first that is not below (size, 0) is the fullest row with room.
    open_rows: list[int] = []
    for piece in _cut(lengths, row_length, first):
        size = piece[2]
        at = bisect_left(open_rows, size << _ROW_BITS)
        if at == len(open_rows):
            room, row = row_length, len(rows)
            rows.append([piece])
        else:
            room, row = divmod(open_rows.pop(at), 1 << _ROW_BITS)
            rows[row].append(piece)
        if room > size:
            insort(open_rows, (room - size) << _ROW_BITS | row)
    return rows


def pack_concatenated(lengths: NDArray[Any], row_length: int, first: int = 0) -> list[Row]:
    """Puts documents one behind the other and cuts where a row ends. Only the last row can have room left."""
    rows: list[Row] = []
    taken = 0  # tokens in all rows
    for document, length in enumerate(lengths.tolist(), first):
        start = 0
        while start < length:
            if taken % row_length == 0:
                rows.append([])
            size = min(row_length - taken % row_length, length - start)
            rows[-1].append((document, start, size))
            start, taken = start + size, taken + size
    return rows


def _cut(lengths: NDArray[Any], row_length: int, first: int) -> list[Piece]:
    """The documents as pieces of at most a row, from the longest to the shortest."""
    lengths = np.asarray(lengths, dtype=np.int64)
    counts = -(-lengths // row_length)
    documents = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * row_length
    sizes = np.minimum(lengths[documents] - starts, row_length)
    order = np.argsort(-sizes, kind="stable")
    documents += first
    return list(zip(documents[order].tolist(), starts[order].tolist(), sizes[order].tolist(), strict=True))


PADDING = -1  # the document number of a row's padding

_PACKERS = {"best_fit": pack_best_fit, "concatenate": pack_concatenated}


def packer(method: str) -> Callable[[NDArray[Any], int, int], list[Row]]:
    refuse(method not in _PACKERS, f"method={method!r} is unknown. Use {' or '.join(map(repr, _PACKERS))}.", DataError)
    return _PACKERS[method]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """From documents to the tensors of a row."""

    pad_id: int
    field: str
    vocabulary_size: int | None

    def __post_init__(self) -> None:
        last = (torch.iinfo(torch.int64).max if self.vocabulary_size is None else self.vocabulary_size) - 1
        if not isinstance(self.pad_id, int) or not 0 <= self.pad_id <= last:
            raise DataError(f"pad_id={self.pad_id!r} is no token id. Give one from 0 to {last}.")

    def row(
        self, pieces: Row, loaded: Mapping[int, Document] | Sequence[Document], room: int | None
    ) -> dict[str, Tensor]:
        """The pieces of `loaded` documents, with `room` for tokens. None makes the row as long as its tokens."""
        sizes = [size for _, _, size in pieces]
        length = sum(sizes)
        tokens = np.full(room or length, self.pad_id, dtype=np.int64)
        labels = np.full(room or length, IGNORED, dtype=np.int64)
        weights = np.zeros(room or length, dtype=np.float32)
        at = 0
        for document, start, size in pieces:
            ids, counts = loaded[document]
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

    def load(self, document: Any, length: int, place: str) -> Document:
        """A document's token ids, and the weight of each label: of the next token."""
        weights, wrong = None, None
        if isinstance(document, Mapping):
            if self.field not in document:
                there = ", ".join(map(repr, document))
                raise DataError(f"{place} has no {self.field!r}, but {there}. Name its token ids in field=.")
            document, weights = document[self.field], document.get("weights")
        ids = np.asarray(document)
        weights = None if weights is None else np.asarray(weights, dtype=np.float32)
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
        elif weights is not None and weights.shape != (length,):
            wrong = f"has {length} tokens and weights of shape {weights.shape}. Give one for each token."
        elif weights is not None and (unusable := weights[~((weights >= 0.0) & (weights < np.inf))]).size:
            wrong = f"has a weight of {unusable[0]}. A weight is a finite number, 0 for what is not learned."
        refuse(wrong, f"{place} {wrong}", DataError)
        return ids, None if weights is None else weights[1:]


_FEWEST_ROWS = 512  # the last rows of a block stay partly empty: 2 of 512 are 0.4%
# The rows of a long document are spread over its block only, so a block is of many documents, if that is not too much.
_FEWEST_DOCUMENTS, _MOST_DOCUMENTS = 1024, 65536
_MOST_ROWS = 8192
_EMPTY_BLOCKS = 1000
# Parts of a block have at least about this number of rows: the last rows of each stay partly empty too.
_FEWEST_ROWS_OF_PART = 32


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    first_row: int  # position of its first row
    rows: list[Row]  # of documents that are counted from the block's first
    lengths: NDArray[Any]

    @property
    def end(self) -> int:
        return self.first_row + len(self.rows)


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
    _fills_rows = True  # whether each row has `row_length` tokens, padding included

    def __post_init__(self) -> None:
        name = type(self.documents).__name__
        if not isinstance(self.documents, OrderedDataset):
            raise DataError(f'{name} has no order, which rows need. Give Mixture({{"name": documents}}).')
        if len(self.documents) == 0:
            raise DataError(f"The documents ({name}) are none: their length is 0. Check their path, split and filters.")
        self.documents.lengths(0, 1)  # which names documents or a source without lengths
        check_count("row_length", self.row_length, hint="Give the number of tokens in a row.")
        if self.block_size is not None:
            hint = "Give the number of documents whose rows are made together."
            check_count("block_size", self.block_size, hint=hint)
        self._format = RowFormat(self.pad_id, self.field, self.vocabulary_size)
        self._seed = self._epoch = 0
        self._counted: tuple[Any, list[int]] | None = None
        self._state: dict[str, Any] | None = None
        self._per_block: int | None = None
        self._block: _Block | None = None

    @property
    def source(self) -> OrderedDataset:
        return self.documents

    @property
    def may_change(self) -> bool:
        return self.documents.may_change

    @abstractmethod
    def _pack(self, lengths: NDArray[Any], first: int) -> list[Row]:
        """The rows of documents, which are numbered from `first` on."""

    @abstractmethod
    def _arranged(self, num_rows: int, first_row: int, seed: int) -> list[int]:
        """The order in which packed rows come."""

    def __len__(self) -> int:
        """Rows of a pass, counted from all lengths at about 1 us each. ENDLESS if the documents never end."""
        return ENDLESS if self._is_endless else self._first_rows()[-1]

    def begin(self, seed: int, state: dict[str, Any] | None) -> None:
        saved = {} if state is None else state["rows"]
        now = self._rows.items() if saved else ()
        other = [f"{name} was {saved.get(name)!r} and is {value!r}" for name, value in now if saved.get(name) != value]
        if other:
            raise DataError(
                f"The run resumes with rows made in another way: {', '.join(other)}. Make them as before, or start a "
                "new run from the checkpoint's weights."
            )
        self.documents.begin(seed, None if state is None else state["documents"])
        self._seed, self._epoch = seed, 0
        self._state, self._block = state, None
        self._per_block = None if state is None else state["block_size"]

    def set_epoch(self, epoch: int) -> None:
        self.documents.set_epoch(epoch)
        self._epoch, self._block = epoch, None

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
        return None if block is None else (block.number, block.first_row, len(block.rows))

    def changes_at(self, position: int, mark: Any = None) -> bool:
        has_changed = self.documents.changes_at(self._begun(position, mark))
        if has_changed:
            self._block = self._counted = None
        return has_changed

    def numbers_at(self, position: int, mark: Any = None) -> Mapping[str, float]:
        number, first_row = self._anchor_at(position, mark)
        document = number * self.documents_per_block
        if mark is not None and number == mark[0]:
            of_block = min(self.documents_per_block, len(self.documents) - document)
            document += round((position - first_row) / mark[2] * of_block)
        return self.documents.numbers_at(document)

    @property
    def documents_per_block(self) -> int:
        if self._per_block is None and self.block_size is not None:
            self._per_block = self.block_size
        elif self._per_block is None:
            judged = min(len(self.documents), 4096)
            mean = float(np.mean(self.documents.lengths(0, judged)))
            if mean == 0.0:
                raise DataError(f"The first {judged} documents have no token. Look at their source, or its lengths.")
            per_row = self.row_length / mean
            spread = min(_FEWEST_DOCUMENTS, round(_MOST_ROWS * per_row))
            self._per_block = min(max(round(_FEWEST_ROWS * per_row), spread, 1), _MOST_DOCUMENTS)
        return self._per_block

    @property
    def _is_endless(self) -> bool:
        return len(self.documents) == ENDLESS

    @property
    def _rows(self) -> dict[str, Any]:
        """What decides the tokens of each row, besides the documents."""
        options = ("row_length", "block_size", "method", "bucket_size")
        return {"kind": type(self).__name__} | {name: vars(self)[name] for name in options if name in vars(self)}

    def _start(self) -> tuple[int, int]:
        """The block that reading begins with, and the position of its first row."""
        state = self._state
        if state is None:
            return 0, 0
        if state["block"] * self.documents_per_block >= self.documents.first_position:
            return state["block"], state["first_row"]
        # Other documents come now: of the block that was begun no more can be read.
        return -(-state["begun"] // self.documents_per_block), state["position"]

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
            refuse(position >= first_rows[-1], f"Row {position} of {first_rows[-1]}.", IndexError)
            found = bisect_right(first_rows, position) - 1
            return self._load_block(number + found, first_rows[found])
        if self._block is not None and self._block.end <= position:
            number, first_row = self._block.number + 1, self._block.end
        num_empty = 0
        while (block := self._load_block(number, first_row)).end <= position:
            num_empty = 0 if block.rows else num_empty + 1
            if num_empty == _EMPTY_BLOCKS:
                last = (number + 1) * self.documents_per_block
                raise DataError(
                    f"{_EMPTY_BLOCKS} blocks of documents up to {last} have no token. Look at their lengths."
                )
            number, first_row = number + 1, block.end
        return block

    def _load_block(self, number: int, first_row: int) -> _Block:
        lengths = self._lengths(number)
        rows: list[Row] = []
        for part, packed in enumerate(self._parts(number, lengths)):
            seed = hash_seed(b"rows", self._seed, self._epoch, number, *((part,) if part else ()))
            rows += [packed[row] for row in self._arranged(len(packed), first_row + len(rows), seed)]
        return _Block(number, first_row, rows, lengths)

    def _parts(self, number: int, lengths: NDArray[Any]) -> list[list[Row]]:
        """The rows of a block, by parts that are packed separately: before and after a stage of the documents."""
        first = number * self.documents_per_block
        tokens = np.append(0, np.cumsum(lengths, dtype=np.int64))  # before each document
        firsts = [0]
        for position in self.documents.stages_within(first, first + len(lengths)):
            before = tokens[position - first]
            if min(before - tokens[firsts[-1]], tokens[-1] - before) >= _FEWEST_ROWS_OF_PART * self.row_length:
                firsts.append(position - first)
        return [self._pack(lengths[begin:end], begin) for begin, end in pairwise([*firsts, len(lengths)])]

    def _first_rows(self) -> list[int]:
        """Positions of the first row of each block from the anchor on, and of the pass's end."""
        number, first_row = self._start()
        documents = len(self.documents), self.documents.state_at(number * self.documents_per_block)
        of = self._seed, self._epoch, self.documents_per_block, number, first_row, documents
        if self._counted is None or self._counted[0] != of:
            num_blocks = -(-len(self.documents) // self.documents_per_block)
            blocks = (self._parts(block, self._lengths(block)) for block in range(number, num_blocks))
            counts = (sum(map(len, parts)) for parts in blocks)
            self._counted = of, list(accumulate(counts, initial=first_row))
        return self._counted[1]

    def _lengths(self, block: int) -> NDArray[Any]:
        first = block * self.documents_per_block
        last = min(first + self.documents_per_block, len(self.documents))
        lengths: NDArray[Any] = np.asarray(self.documents.lengths(first, last))
        are_counts = lengths.shape == (last - first,) and lengths.dtype.kind in "iu" and lengths.min(initial=0) >= 0
        if not are_counts:
            raise DataError(
                f"lengths({first}, {last}) of the documents ({type(self.documents).__name__}) gave {lengths.dtype} of "
                f"shape {lengths.shape}, from {lengths.min(initial=0)} on, not {last - first} integers of 0 or more."
            )
        return lengths

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        block = self._block_at(position)
        pieces, first = block.rows[position - block.first_row], block.number * self.documents_per_block
        loaded = {
            number: self._format.load(
                self.documents[first + number], int(block.lengths[number]), f"The document at position {first + number}"
            )
            for number, _, _ in pieces
        }
        return self._format.row(pieces, loaded, self.row_length if self._fills_rows else None)


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

    def __post_init__(self) -> None:
        packer(self.method)  # refuses what is none
        super().__post_init__()

    def _pack(self, lengths: NDArray[Any], first: int) -> list[Row]:
        return packer(self.method)(lengths, self.row_length, first)

    def _arranged(self, num_rows: int, first_row: int, seed: int) -> list[int]:
        # Best fit puts the pieces of long documents first, and what was left over last.
        return random_order(num_rows, seed).tolist()


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
    _fills_rows = False

    def __post_init__(self) -> None:
        check_count("bucket_size", self.bucket_size, hint="Give the samples of one optimizer step.")
        check_count("multiple_of", self.multiple_of, hint="Give 1 for any length.")
        if self.block_size is None:
            self.block_size = 64 * self.bucket_size
        super().__post_init__()

    def collate(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Pads rows to the longest, and stacks them: each tensor has the shape `(rows, longest)`."""
        longest = max(len(row["tokens"]) for row in rows)
        length = -(-longest // self.multiple_of) * self.multiple_of
        fill = {"tokens": self.pad_id, "labels": IGNORED, "positions": 0, "documents": PADDING, "weights": 0.0}
        return {
            name: torch.stack([F.pad(row[name], (0, length - len(row[name])), value=value) for row in rows])
            for name, value in fill.items()
        }

    def _pack(self, lengths: NDArray[Any], first: int) -> list[Row]:
        return [[piece] for piece in _cut(lengths, self.row_length, first)]

    def _arranged(self, num_rows: int, first_row: int, seed: int) -> list[int]:
        # The bucket that the block before began is completed by short rows, and the last one begun with short ones: a
        # batch of both is then padded little.
        size = self.bucket_size
        num_buckets, num_last = divmod(num_rows - min(-first_row % size, num_rows), size)
        short = [*range(num_buckets * size, num_rows)]
        whole = [bucket * size + row for bucket in random_order(num_buckets, seed).tolist() for row in range(size)]
        return [*short[num_last:], *whole, *short[:num_last]]
