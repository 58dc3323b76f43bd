"""Private parts of Hugging Face's `datasets` that the package needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def shuffles_in_a_buffer(dataset: Any) -> bool:
    """Whether a streaming dataset was made by `shuffle`, whose buffer its state leaves out."""
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    return any(isinstance(part, BufferShuffledExamplesIterable) for part in _parts(dataset._ex_iterable))


def files_read(dataset: Any) -> list[str]:
    """The files that a streaming dataset reads, as far as known from its loader; for messages."""
    from datasets.iterable_dataset import ArrowExamplesIterable, ExamplesIterable

    found: list[str] = []
    for part in _parts(dataset._ex_iterable):
        if isinstance(part, ArrowExamplesIterable | ExamplesIterable):
            given = part.kwargs.get("files") or part.kwargs.get("base_files") or []
            found += [file for file in given if isinstance(file, str)]
    return found


def _parts(iterable: Any) -> Iterator[Any]:
    from datasets.iterable_dataset import _BaseExamplesIterable

    yield iterable
    for value in vars(iterable).values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, _BaseExamplesIterable):
                yield from _parts(inner)
