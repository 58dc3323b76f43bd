"""What the parameter groups of `fully_shard` tell the trainer of this rank's gradients (fully_shard.py fills it in)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn


@dataclass
class LocalGradients:
    """What this rank knows of the gradients of sharded and replicated models; empty in one process.

    Attributes:
        shared: The `fully_shard` group of each parameter, by id, of which each rank keeps a share.
        whole: By id of each parameter that replicas keep whole, the type its gradient is reduced in; None for its own.
        used: Ids of shared parameters that this rank's own backwards gave a gradient, since their last step.
        ran: Ids of the groups that ran a forward in the window.
        waiting: Groups that ended a backward whose gradients have not crossed ranks yet.
        graphs: Groups, in order, whose gathered parameters the graph of a gradient refers to (`create_graph=True`).
        order: A number made of all that groups gathered and reduced so far, in order; equal ranks have equal ones.
    """

    shared: dict[int, Any] = field(default_factory=dict)
    whole: dict[int, torch.dtype | None] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    ran: set[int] = field(default_factory=set)
    waiting: set[Any] = field(default_factory=set)
    graphs: dict[Any, None] = field(default_factory=dict)
    order: int = 0

    def note_collective(self, number: int) -> None:
        """A group begins a collective; `number` says which. Ranks that ran others would mix what they send."""
        self.order = (self.order * 1_000_003 + number + 1) & 0xFF_FFFF  # whose square fits where ranks add theirs up

    def has_gradients(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether this rank's backwards gave one of `parameters` a gradient that is still there."""
        kept = set()
        for p in parameters:
            group = self.shared.get(id(p))
            if p.grad is not None and (group is None or id(p) in self.used):
                return True
            if group is not None and group in self.waiting:
                kept.add(group)
        return any(group.keeps_gradients() for group in kept)

    def let_graphs_go(self) -> None:
        """No graph of a gradient is used any more."""
        for group in self.graphs:
            group.let_go()
        self.graphs.clear()

    def drop_what_waits(self) -> None:
        """Forgets gradients that have not crossed ranks."""
        for group in self.waiting:
            group.drop_gradients()
        self.waiting.clear()
        self.used.clear()
