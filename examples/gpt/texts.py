"""Two corpora that ship with Python, as documents: the source of the standard library, and what is written in it.

Files, not documents, are divided into train and validation, so that no validation text has a neighbour in training.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from corpus import is_validation, source_files
from numpy.typing import NDArray
from torch.utils.data import Dataset

END = b"\0"
"""The byte that ends a document; no text has it."""
_LONGEST_HELD_OUT = 2048
_DOCUMENTATION = re.compile(rb'^[ \t]*[rR]?"""(.+?)"""', re.MULTILINE | re.DOTALL)


class Texts(Dataset[NDArray[np.uint8]]):
    """Documents of bytes, which are the tokens here, and how long each is."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self.lengths = np.array([len(text) for text in texts])

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """One document, uint8 [length]."""
        return np.frombuffer(self.texts[index], dtype=np.uint8)


class Corpora(NamedTuple):
    """Both corpora by name, in two halves."""

    train: dict[str, Texts]
    validation: dict[str, Texts]

    def unigram_entropy(self) -> float:
        """Nats per byte of the best model that knows only how often each byte occurs in the validation texts."""
        texts = b"".join(text for source in self.validation.values() for text in source.texts)
        share = np.bincount(np.frombuffer(texts, dtype=np.uint8)) / len(texts)
        return float(-(share[share > 0] * np.log(share[share > 0])).sum())


def load_corpora(validation_percent: int = 4) -> Corpora:
    """Reads the standard library's own `.py` files: "code" is each of them, "docs" each documentation string.

    Args:
        validation_percent: share of the files held out; of their texts the first 2048 bytes.
    """
    found: dict[bool, dict[str, list[bytes]]] = {half: {"code": [], "docs": []} for half in (False, True)}
    for name, source in source_files():
        held_out = is_validation(name, validation_percent)
        cut = _LONGEST_HELD_OUT if held_out else None
        found[held_out]["code"].append(source[:cut] + END)
        found[held_out]["docs"] += [text[:cut] + END for text in _documentation(source)]
    train, validation = ({name: Texts(texts) for name, texts in found[half].items()} for half in (False, True))
    return Corpora(train, validation)


def _documentation(source: bytes) -> list[bytes]:
    """What stands between triple quotes at the beginning of a line."""
    texts = (inspect.cleandoc(text.decode(errors="replace")) for text in _DOCUMENTATION.findall(source))
    return [text.encode() for text in texts if text]
