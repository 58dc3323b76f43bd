"""What a tensor was computed from, by names of PyTorch's that are private.

`tests/compat/test_computed_from.py` exercises them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def viewed(tensor: Tensor) -> Tensor:
    """What `tensor` is a view of, or itself."""
    base = tensor._base
    return tensor if base is None else base


def is_computed_from(tensor: Tensor, fits: Callable[[torch.Size], bool], most: int = 2000) -> bool:
    """Whether a shape that fits is among those of what `tensor` was computed from, as far as autograd knows."""
    waiting = deque([tensor.grad_fn])
    seen: set[object] = {None}
    while waiting and len(seen) <= most:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(fits(shape) for shape in _shapes(node)):
            return True
        waiting.extend(before for before, _ in node.next_functions)
    return False


def _shapes(node: torch.autograd.graph.Node) -> Iterable[torch.Size]:
    """Of the operation's outputs."""
    return [torch.Size(output.shape) for output in node._input_metadata]
