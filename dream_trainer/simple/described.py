"""A batch in a message: what it is made of, with dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def described(value: Any) -> str:
    """`(float32 [32, 5], int64 [32])`, with names where it has them: `{'labels': int64 [32]}`."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {described(part)}" for name, part in value.items()) + "}"
    if isinstance(value, tuple | list) and len(value) <= 8:
        parts = ", ".join(map(described, value))
        return f"({parts})" if isinstance(value, tuple) else f"[{parts}]"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
