"""Documents packed into rows of one length: tokens, what each predicts, and which document each belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dream_trainer.checks import refuse
from dream_trainer.data.ordered import OrderedDataset
from dream_trainer.data.packing.document_blocks import DocumentBlocks, block_order
from dream_trainer.data.packing.packing import RowPlan, pack_best_fit, pack_concatenated
from dream_trainer.data.sources.measured import FOLLOWING
from dream_trainer.errors import DataError

IGNORED = -100  # the label of a token that predicts nothing; `cross_entropy` leaves it out by default
PADDING = -1  # the document number of a row's padding

_FEWEST_LOOKED_AT, _MOST_LOOKED_AT = 64, 1024

_PACKERS = {"best_fit": pack_best_fit, "concatenate": pack_concatenated}


class DocumentRows(DocumentBlocks):
    """Rows of documents' tokens; a mapping's `weights` say how much predicting each token counts."""

    def __init__(
        self,
        documents: OrderedDataset,
        row_length: int,
        *,
        block_size: int | None,
        pad_id: int,
        field: str,
        vocabulary_size: int | None,
    ) -> None:
        super().__init__(documents, row_length, block_size)
        last = (torch.iinfo(torch.int64).max if vocabulary_size is None else vocabulary_size) - 1
        if not isinstance(pad_id, int) or not 0 <= pad_id <= last:
            raise DataError(f"pad_id={pad_id!r} is no token id. Give one from 0 to {last}; no label ever is padding.")
        self.pad_id = pad_id
        self.field = field
        self.vocabulary_size = vocabulary_size
        self._labels_seen = False

    def _build_row(self, position: int, room: int | None) -> dict[str, Tensor]:
        """The row at `position`, with `room` for tokens; None gives it as much as it has tokens."""
        block = self._block_at(position)
        pieces = block.plan.pieces(int(block.order[position - block.first_row]))
        sizes = [size for _, _, size in pieces]
        length = sum(sizes)
        tokens = np.full(room or length, self.pad_id, dtype=np.int64)
        labels = np.full(room or length, IGNORED, dtype=np.int64)
        weights = np.zeros(room or length, dtype=np.float32)
        at = 0
        for document, start, size in pieces:
            ids, next_ids, counts = self._load(block.number * self.block_size + document, int(block.lengths[document]))
            tokens[at : at + size] = ids[start : start + size]
            num_labels = min(size, len(next_ids) - start)  # a document's last token predicts nothing
            labels[at : at + num_labels] = next_ids[start : start + num_labels]
            weights[at : at + num_labels] = 1.0 if counts is None else counts[start : start + num_labels]
            at += size
        labels[weights == 0.0] = IGNORED
        if not self._labels_seen:
            self._labels_seen = bool(weights.any())
            if not self._labels_seen:
                self._refuse_documents_without_labels(block.number * self.block_size)
        positions = np.zeros(room or length, dtype=np.int64)
        positions[:length] = np.arange(length) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        documents = np.full(room or length, PADDING, dtype=np.int64)
        documents[:length] = np.repeat(np.arange(len(sizes)), sizes)
        row = {"tokens": tokens, "labels": labels, "positions": positions, "documents": documents, "weights": weights}
        return {name: torch.from_numpy(values) for name, values in row.items()}

    def _load(self, position: int, length: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
        """Token ids of a document, its labels, and what each label counts."""
        document, weights, following = self.documents[position], None, None
        place = f"The document at position {position}"
        if isinstance(document, Mapping):
            if self.field not in document:
                there = ", ".join(map(repr, document))
                raise DataError(f"{place} has no {self.field!r}, but {there}. Name its token ids in field=.")
            document, weights, following = document[self.field], document.get("weights"), document.get(FOLLOWING)
        ids, wrong = np.asarray(document), None
        if ids.shape != (length,):
            wrong = (
                f"has {length} tokens by the lengths that its rows were planned with, and was loaded with shape "
                f"{ids.shape}. Measure the lengths anew, and load a document as the same tokens each time."
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
        if weights is not None:
            return ids, ids[1:], weights[1:]
        return ids, ids[1:] if following is None else np.append(ids[1:], following), None

    def _refuse_documents_without_labels(self, first: int) -> None:
        """Raises if nothing can be learned from many documents, from position `first` on: so it is with all of them."""
        last = min(first + _MOST_LOOKED_AT, len(self.documents))
        first = max(min(first, last - _MOST_LOOKED_AT), self.documents.first_position)
        documents: Any = self.documents
        for position, length in enumerate(documents.lengths(first, last).tolist(), first):
            _, labels, weights = self._load(position, length)
            if len(labels) and (weights is None or weights.any()):
                self._labels_seen = True
                return
        if last - first >= _FEWEST_LOOKED_AT:
            raise DataError(
                f"None of the {last - first} documents from position {first} on has a token to learn: they are of one "
                "token, or their weights are 0. Give a weight of 1 to the tokens of answers, and 0 to those of prompts."
            )


class PackedRows(DocumentRows):
    """Documents packed into rows of `row_length` tokens, in blocks that know nothing of each other.

    Give it to a `DistributedDataLoader`. A row is a dict of tensors of shape `(row_length,)`:

        tokens     int64; `pad_id` where there is room left
        labels     int64: the document's next token, also where the row ends before the document does; -100 at the
                   document's end, in padding, and where the weight is 0
        positions  int64, from 0 in each piece of a document
        documents  int64: which piece of a document, from 0 in each row; -1 is padding
        weights    float32: how much each label counts, 1 if the document says nothing else; 0 where there is none

    Args:
        documents: The documents in their order, such as a `Mixture` of `TokenFile`s. They say their lengths.
        row_length: Tokens in a row.
        method: "best_fit" cuts only documents longer than a row, and fills rows to 98% and more where many documents
            are shorter; "concatenate" puts them one behind the other and cuts wherever a row ends.
        pad_id: Token id of padding.
        block_size: Documents that are packed together, over whose rows those of a long one are spread. None: as many as
            fill 512 rows; where documents are long 1024 of them, or as many as fill 8192 rows.
        field: Name of the token ids in documents that are mappings.
        vocabulary_size: Number of token ids; with it, each is checked when it is loaded.

    Raises:
        DataError: `documents` have no order of their own, no lengths, or are none; `method` is neither, `row_length` or
            `block_size` not positive, or `pad_id` no token id. When a row is loaded: a document is not what its length
            says, its token ids are outside the vocabulary or its weights negative; or of 1024 documents none has a
            token to learn.
    """

    def __init__(
        self,
        documents: OrderedDataset,
        row_length: int,
        *,
        method: Literal["best_fit", "concatenate"] = "best_fit",
        pad_id: int = 0,
        block_size: int | None = None,
        field: str = "tokens",
        vocabulary_size: int | None = None,
    ) -> None:
        if method not in _PACKERS:
            raise DataError(f"method={method!r} is unknown. Use {' or '.join(map(repr, _PACKERS))}.")
        super().__init__(
            documents, row_length, block_size=block_size, pad_id=pad_id, field=field, vocabulary_size=vocabulary_size
        )
        self.method = method

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self._build_row(position, self.row_length)

    @property
    def _kind(self) -> dict[str, Any]:
        return {"method": self.method}

    def _pack(self, lengths: NDArray[Any]) -> RowPlan:
        return _PACKERS[self.method](lengths, self.row_length)

    def _arrange(self, plan: RowPlan, first_row: int, seed: int) -> NDArray[np.int64]:
        # Best fit puts the pieces of long documents first, and what was left over last.
        return block_order(seed, plan.num_rows)
