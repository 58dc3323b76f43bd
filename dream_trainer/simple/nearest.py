"""What to say of a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from dream_trainer.checks import spell


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'epochs'?`, or all that there are where nothing is near."""
    known = [*known]
    found = get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f"Did you mean {found[0]!r}?" if found else f"Use {spell(map(repr, known))}."
