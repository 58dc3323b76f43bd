"""Texts to classify, which come with Python: from which package of the standard library is it?"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
VOCABULARY, LONGEST, LINES = 4096, 96, 10


def sources(packages: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The number of a package and a file's text, alike on all ranks; without tests, which some leave out."""
    root = Path(os.__file__).parent
    for label, package in enumerate(packages):
        for path in sorted((root / package).rglob("*.py")):
            if not {"test", "tests"} & set(path.relative_to(root).parts):
                yield label, path.read_text(encoding="utf-8")


def pieces(*, held_out: bool) -> list[tuple[Tensor, int]]:
    """Numbers of the words in ten lines of code, and of their package. The last sixth of each file is held out."""
    samples = []
    for label, source in sources(PACKAGES):
        lines = source.splitlines()
        cut = len(lines) * 5 // 6
        lines = lines[cut:] if held_out else lines[:cut]
        for start in range(0, len(lines), LINES):
            words = re.findall(r"\w+|[^\w\s]", "\n".join(lines[start : start + LINES]))[:LONGEST]
            if len(words) >= LINES:
                # 0 is for padding. The checksum is the same in each process, which hash() is not.
                numbers = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
                samples.append((torch.tensor(numbers), label))
    return samples


def docstrings(packages: Sequence[str], *, held_out: bool) -> list[tuple[str, int]]:
    """First paragraphs of docstrings, each once, and the number of their package. An eighth is held out."""
    found = dict[str, int]()
    for label, source in sources(packages):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if len(text) > 20:
                    found.setdefault(text, label)
    # Depends on the text alone, so that every rank and machine agrees.
    is_held_out = {text: hashlib.sha256(text.encode()).digest()[0] < 256 // 8 for text in found}
    return [(text, label) for text, label in found.items() if is_held_out[text] == held_out]


def common_words(packages: Sequence[str], count: int) -> dict[str, int]:
    """Numbers of the most common words in docstrings to train on, and of a BERT's own; ties go by the alphabet."""
    texts = (text.lower() for text, _ in docstrings(packages, held_out=False))
    counts = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:count]
    return {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
