"""What the trainer knows of this rank's gradients from the parameter groups of `fully_shard` (see fully_shard.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.nn as nn

from dream_trainer.own_time import OwnTime

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass
class LocalGradients:
    """The state of gradients of sharded and replicated models on this rank; empty in one process.

    Attributes:
        shared: The `fully_shard` group of each sharded parameter, by the parameter's id.
        used: Ids of sharded parameters that a backward on this rank gave a gradient, since their last step.
        ran: Ids of the groups that ran a forward in the window.
        zeros: Ids of sharded parameters that this rank brought zeros for in the window.
        waiting: Groups that ended a backward whose gradients are not reduced over ranks yet.
        graphs: Groups, in order, whose gathered parameters the graph of a gradient refers to (`create_graph=True`).
        own_time: How long this rank is busy with its windows, without collectives.
        shares_experts: Whether ranks share experts.
        expert_copies: The ranks that have the same experts as this one; None where it is the only one.
        tied: The ranks of the pipeline that have a copy of a parameter each, by the parameter's id.
        whole: Ids of those of them that belong to models which every rank of the pipeline has whole.
        order: A hash of all collectives of the groups so far, in order: equal where ranks ran the same ones.
        steps: A hash of what was stepped so far, in order; 0 but in the stages of a pipeline.
        shard_of: The shard by the id of the whole parameter, of models that are whole in steps.
        owners: The `fully_shard` group by the storage that its gatherings fill.
        groups: All groups of `fully_shard`.
        saved: The `SavedWeights` that forwards of these groups are in.
    """

    shared: dict[int, Any] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    ran: set[int] = field(default_factory=set)
    zeros: set[int] = field(default_factory=set)
    waiting: set[Any] = field(default_factory=set)
    graphs: dict[Any, None] = field(default_factory=dict)
    own_time: OwnTime = field(default_factory=OwnTime)
    shares_experts: bool = False
    expert_copies: dist.ProcessGroup | None = None
    tied: dict[int, tuple[int, ...]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    order: int = 0
    steps: int = 0
    shard_of: dict[int, nn.Parameter] = field(default_factory=dict)
    owners: dict[int, Any] = field(default_factory=dict)
    saved: Any = None
    groups: list[Any] = field(default_factory=list)

    def note_collective(self, number: int) -> None:
        """A group begins the collective `number`. Ranks that run different ones would mix up what they send."""
        self.order = _followed(self.order, number)

    def note_step(self, number: int) -> None:
        """Optimizers are stepped; `number` says which."""
        self.steps = _followed(self.steps, number)

    def has_gradients(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of `parameters` has a gradient from a backward on this rank."""
        waiting_groups = set()
        for p in parameters:
            group = self.shared.get(id(p))
            if p.grad is not None and (group is None or id(p) in self.used):
                return True
            if group is not None and group in self.waiting:
                waiting_groups.add(group)
        return any(group.keeps_gradients() for group in waiting_groups)

    def let_graphs_go(self) -> None:
        """Releases what graphs of gradients refer to: none of them is used any more."""
        for group in self.graphs:
            group.let_go()
        self.graphs.clear()

    def drop_what_waits(self) -> None:
        """Drops gradients that are not reduced over ranks yet."""
        for group in self.waiting:
            group.drop_gradients()
        self.waiting.clear()
        self.used.clear()


def _followed(order: int, number: int) -> int:
    return (order * 1_000_003 + number + 1) & 0xFF_FFFF  # small, since its squares are summed over ranks
