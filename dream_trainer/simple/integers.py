"""Integers of other libraries, as arguments."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def as_int(value: Any) -> Any:
    """Another library's integer, such as numpy's, as Python's, which a config can keep; anything else as it is."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
