"""What of a loss's graph autograd tells no other way than by its nodes; tests/compat/test_loss_graph.py uses it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch.nn as nn
from torch import Tensor


def trained_by(loss: Tensor, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a backward from `loss` would give one of `parameters` a gradient."""
    wanted = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if not wanted:
        return False
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad" and id(cast(Any, node).variable) in wanted:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
