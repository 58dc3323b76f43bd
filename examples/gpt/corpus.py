"""Real text without a download: the source of the Python standard library that runs this file.

Files, not windows, are divided into train and validation, so that no validation text has a neighbour in training.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Many distributions of Python leave out the tests; the rest is generated tables and prose, not code by people.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}


class Windows(Dataset[Tensor]):
    """Windows of `length` consecutive bytes, cut from the joined text without overlap.

    Args:
        text: uint8 bytes [total].
        length: bytes per window.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        count = len(text) // length
        if count == 0:
            raise ValueError(f"The text has {len(text)} bytes, less than one window of {length}. Use a smaller window.")
        self.windows = text[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        """One window, uint8 [length]."""
        return self.windows[index]

    def unigram_entropy(self) -> float:
        """Nats per byte of the best model that knows only how often each byte occurs in these windows."""
        count = torch.bincount(self.windows.flatten().long(), minlength=256).double()
        probability = count / count.sum()
        return float(torch.special.entr(probability).sum())


@dataclass(frozen=True)
class Corpus:
    """The two halves, and how many files each came from."""

    train: Windows
    validation: Windows
    n_train_files: int
    n_validation_files: int


def is_validation(relative_path: str, percent: int) -> bool:
    """Whether a file is held out; depends on its name alone, so that every rank and machine agrees."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def source_files() -> list[tuple[str, bytes]]:
    """The standard library's own `.py` files: the path of each below its folder, and what is in it."""
    root = Path(os.__file__).parent
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - LEFT_OUT  # not entered: installed packages are twenty times as many files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return [(path.relative_to(root).as_posix(), path.read_bytes()) for path in sorted(files)]


def load_corpus(window: int, *, validation_percent: int = 4, max_validation_windows: int = 1024) -> Corpus:
    """Reads the standard library's own `.py` files.

    Args:
        window: bytes the model sees; a window holds one more, the last one's target.
        validation_percent: share of the files held out.
        max_validation_windows: validation keeps this many windows, evenly spread over the held-out text.
    """
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, source in source_files():
        texts[is_validation(name, validation_percent)].append(source)
    train, validation = (
        Windows(torch.frombuffer(bytearray(b"\n".join(texts[held_out])), dtype=torch.uint8), window + 1)
        for held_out in (False, True)
    )
    stride = -(-len(validation) // max_validation_windows)
    validation.windows = validation.windows[::stride].contiguous()
    return Corpus(train, validation, n_train_files=len(texts[False]), n_validation_files=len(texts[True]))
