"""How many tokens a batch has, where it says so itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100


def count_tokens(batch: Any) -> int | None:
    """Tokens of a batch, without padding; None where it does not tell, or only by waiting for a device.

    Known are dicts with "documents" (packed or padded rows: numbers of 0 and more), "attention_mask" (ones), or
    "labels" of whole numbers for each token (but for -100); batches of several loaders have the sum of theirs.
    """
    if isinstance(batch, Mapping):
        for key, count in _COUNTS.items():
            values = batch.get(key)
            is_of_samples = key == "labels" and type(values) is Tensor and values.ndim < 2  # classes, say
            if type(values) is Tensor and values.dtype is not torch.float32 and not is_of_samples:
                return int(count(values)) if values.device.type == "cpu" else None
        counts = [count_tokens(part) for part in batch.values() if isinstance(part, Mapping)]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None
    if type(batch) is tuple and len(batch) == 2 and isinstance(batch[0], str):
        return count_tokens(batch[1])
    return None


_COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "documents": lambda values: (values >= 0).sum(),
    "attention_mask": lambda values: torch.count_nonzero(values),
    "labels": lambda values: (values != IGNORED).sum(),
}
