"""Which of two values of a metric is better."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal


def is_better(value: Any, best: float | None, mode: Literal["min", "max"]) -> bool:
    """Whether a metric's value beats the best so far; equal ones do not.

    Args:
        value: A number. None and NaN are no values, and never better; 0.0, negative and infinite ones are.
        best: None if there is none yet.
        mode: "min" or "max".
    """
    if not is_value(value):
        return False
    if not is_value(best):
        return True
    return bool(value < best if mode == "min" else value > best)


def is_value(value: Any) -> bool:
    """Whether `value` is a number, and not NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
