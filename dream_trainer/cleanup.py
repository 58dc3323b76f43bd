"""Closing: each owner releases its resources, even if another one failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager


@contextmanager
def followed_by(finish: Callable[[], object]) -> Iterator[None]:
    """Calls `finish` at the end of the block; after an exception of the block, one of `finish` becomes a note of it."""
    try:
        yield
    except BaseException as first:
        try:
            finish()
        except Exception as later:
            first.add_note(f"Closing continued after this, and failed again: {in_a_line(later)}")
        raise
    finish()


def call_each(actions: Sequence[Callable[[], object]]) -> None:
    """Calls every one, although others raise; then the first exception is raised, with the later ones as its notes."""
    with ExitStack() as stack:
        for action in reversed(actions):
            stack.enter_context(followed_by(action))


def in_a_line(error: BaseException) -> str:
    """The class of an exception and the first line of its message."""
    return f"{type(error).__name__}: {error}".split("\n")[0]
