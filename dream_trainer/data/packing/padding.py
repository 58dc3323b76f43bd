"""Documents padded instead of packed, one to a row. Rows of like length share a bucket, as large as an optimizer step,
and the buckets of a block come in random order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dream_trainer.checks import check_count
from dream_trainer.data.ordered import OrderedDataset
from dream_trainer.data.packing.packed_rows import IGNORED, PADDING, DocumentRows, block_order
from dream_trainer.data.packing.packing import RowPlan, pack_one_by_one

logger = logging.getLogger("dream_trainer")


class PaddedRows(DocumentRows):
    """Documents as rows of their own lengths, ordered so that a global batch holds rows of like length.

    Give it to a `DistributedDataLoader` with `collate_fn=rows.collate`. A row is what `PackedRows` gives, with one
    document in it and as long as that; a document longer than `row_length` is cut into several, of which a warning
    says how many there are among the first. `collate` pads the rows of a micro-batch to the longest.

    Args:
        documents: The documents in their order, with lengths, as for `PackedRows`.
        row_length: Tokens of the longest row.
        bucket_size: Rows of like length that come together: the samples of one optimizer step over all ranks.
        pad_id: Token id of padding.
        block_size: Documents that are sorted by length together. None: 64 buckets' worth.
        multiple_of: A batch's length is rounded up to a multiple of this, for which kernels are made.
        field: Name of the token ids in documents that are mappings.
        vocabulary_size: Number of token ids; with it, each is checked when it is loaded.

    Raises:
        DataError: As `PackedRows`; or `bucket_size` or `multiple_of` is not positive.
    """

    def __init__(
        self,
        documents: OrderedDataset,
        row_length: int,
        *,
        bucket_size: int,
        pad_id: int = 0,
        block_size: int | None = None,
        multiple_of: int = 1,
        field: str = "tokens",
        vocabulary_size: int | None = None,
    ) -> None:
        check_count("bucket_size", bucket_size, hint="Give the samples of one optimizer step.")
        check_count("multiple_of", multiple_of, hint="Give 1 for any length.")
        super().__init__(
            documents,
            row_length,
            block_size=64 * bucket_size if block_size is None else block_size,
            pad_id=pad_id,
            field=field,
            vocabulary_size=vocabulary_size,
        )
        self.bucket_size = bucket_size
        self.multiple_of = multiple_of
        self._warn_of_long_documents()

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

    @property
    def _kind(self) -> dict[str, Any]:
        return {"bucket_size": self.bucket_size}

    def _pack(self, lengths: NDArray[Any]) -> RowPlan:
        return pack_one_by_one(lengths, self.row_length)

    def _warn_of_long_documents(self) -> None:
        lengths = self._lengths(0)
        num_long = int((lengths > self.row_length).sum())
        if num_long and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(
                "%d of the first %d documents are longer than row_length=%d (the longest is of %d tokens) and are cut "
                "into rows of their own.",
                num_long,
                len(lengths),
                self.row_length,
                lengths.max(),
            )

    def _arrange(self, plan: RowPlan, first_row: int, seed: int) -> NDArray[np.int64]:
        # The bucket that the block before began is completed by short rows, and the last one begun with short ones: a
        # batch of both is then padded little.
        num_first = min(-first_row % self.bucket_size, plan.num_rows)
        num_buckets, num_last = divmod(plan.num_rows - num_first, self.bucket_size)
        whole = np.arange(num_buckets * self.bucket_size).reshape(num_buckets, self.bucket_size)
        short = np.arange(whole.size, plan.num_rows)
        return np.concatenate((short[num_last:], whole[block_order(seed, num_buckets)].ravel(), short[:num_last]))
