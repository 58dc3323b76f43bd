"""Which buffers of a module its `state_dict()` has, without calling that: it may be the user's, or gather shards."""

from __future__ import annotations

import torch.nn as nn


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether the `state_dict()` of `module` has its own `buffer`."""
    return buffer not in module._non_persistent_buffers_set
