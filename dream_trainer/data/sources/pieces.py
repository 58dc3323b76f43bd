"""Long documents as several shorter ones, so that a mixture deals out their parts and not the whole of them at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from dream_trainer.data.sources.measured import Measured
from dream_trainer.errors import DataError

FOLLOWING = "following"  # name of the token id that follows a piece in its document


class Pieces(Dataset[dict[str, Any]]):
    """The documents of a source, those longer than `length` cut into pieces of that many tokens.

    Rows cut long documents too; but all rows of a document are then of one block, and come close together, as do the
    weights of a mixture's stages. Pieces of all documents come in random order. A piece is a dict: its "tokens", and,
    unless it ends its document, the token that is "following", which its last token predicts.

    Args:
        source: Arrays of token ids that say their `lengths`, such as a `TokenFile`.
        length: Tokens of the longest piece; take the `row_length` of the rows.

    Raises:
        DataError: `source` does not say its lengths, or `length` is no positive integer.

    Example:
        ```python
        sources = {name: Pieces(TokenFile(f"tokens/{name}"), 1024) for name in ("code", "docs")}
        mixture = Mixture(sources, weights={"code": 3, "docs": 1}, unit="tokens")
        rows = PackedRows(mixture, row_length=1024)
        ```
    """

    def __init__(self, source: Any, length: int) -> None:
        if not isinstance(source, Measured):
            raise DataError(
                f"{type(source).__name__} does not say how many tokens its documents have: it needs `lengths`. Write "
                "it with `dream-trainer data tokenize`, or use WithLengths(source, measure_lengths(source))."
            )
        if not isinstance(length, int) or length < 1:
            raise DataError(f"length={length!r} is not a positive integer. Give the tokens of the longest piece.")
        self.source: Any = source
        self.length = length
        counts = np.maximum(-(-np.asarray(source.lengths, dtype=np.int64) // length), 1)
        self._ends = np.cumsum(counts)
        self._lengths: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"piece {index} of {len(self)}")
        document = int(np.searchsorted(self._ends, index, side="right"))
        begin = (index - (int(self._ends[document - 1]) if document else 0)) * self.length
        tokens = np.asarray(self.source[document])
        if tokens.ndim != 1:
            raise DataError(
                f"document {document} is of type {type(self.source[document]).__name__} and no row of token ids, which "
                "is what Pieces cuts."
            )
        piece: dict[str, Any] = {"tokens": tokens[begin : begin + self.length]}
        if begin + self.length < len(tokens):
            piece[FOLLOWING] = tokens[begin + self.length]
        return piece

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each piece, shape `(len(self),)`."""
        if self._lengths is None:
            of_documents = np.asarray(self.source.lengths, dtype=np.int64)
            self._lengths = np.full(len(self), self.length, dtype=np.int64)
            before = np.concatenate(([0], self._ends[:-1]))
            self._lengths[self._ends - 1] = of_documents - (self._ends - before - 1) * self.length
        return self._lengths

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_lengths": None}
