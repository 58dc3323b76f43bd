"""This rank's gradients as reported by the parameter groups of `fully_shard` (compat/fully_shard.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch.distributed as dist
import torch.nn as nn


class OwnTime:
    """One rank's clock on the host: it measures how long the host waits for others, not the device's work."""

    __slots__ = ("_left", "waited")

    def __init__(self) -> None:
        self.waited = 0.0  # seconds inside, where this rank may wait for others
        self._left = 0.0

    def __enter__(self) -> None:
        self._left = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.waited += perf_counter() - self._left


@dataclass(frozen=True)
class ModelPart:
    """A part of a model on one of several ranks that see different data; its gradients are sums over them already."""

    copies: dist.ProcessGroup | None  # ranks that have the same part as this one; None if there are no others
    divisor: float  # turns such a sum into a mean over ranks, after the copies are averaged


@dataclass
class GradientState:
    """The state of gradients of sharded and replicated models on this rank; empty in one process."""

    sharded: dict[int, Any] = field(default_factory=dict)  # the `fully_shard` group of each sharded parameter, by id
    used: set[int] = field(default_factory=set)  # ids of parameters that a backward gave a gradient since their step
    ran: set[int] = field(default_factory=set)  # ids of the groups that ran a forward in the window
    zeros: set[int] = field(default_factory=set)  # ids of parameters that this rank brought zeros for
    waiting: set[Any] = field(default_factory=set)  # groups that ended a backward whose gradients are not reduced yet
    graphs: dict[Any, None] = field(default_factory=dict)  # groups that graphs of gradients refer to
    own_time: OwnTime = field(default_factory=OwnTime)  # this rank's, without collectives
    parts: dict[str, ModelPart] = field(default_factory=dict)  # of what is divided over data, by mesh dimension
    tied: dict[int, tuple[int, ...]] = field(default_factory=dict)  # ranks with a copy of a parameter, by its id
    whole: set[int] = field(default_factory=set)  # ids of those of them in models that every stage has whole
    order: int = 0  # a hash of all collectives of the groups so far, in order
    steps: int = 0  # a hash of what was stepped so far; 0 but in stages
    shard_of: dict[int, nn.Parameter] = field(default_factory=dict)  # by the whole parameter's id, in whole steps
    owners: dict[int, Any] = field(default_factory=dict)  # the group by the storage that its gatherings fill
    saved: Any = None  # the `SavedWeights` that forwards are in
    groups: list[Any] = field(default_factory=list)

    def part(self, parameter: nn.Parameter) -> ModelPart | None:
        """Which part `parameter` is; None for one that all ranks share, as replicas or shards."""
        if not self.parts:
            return None
        from torch.distributed.tensor import DTensor

        names = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
        return next((self.parts[name] for name in names if name in self.parts), None)

    def note_collective(self, number: int) -> None:
        """A group begins the collective `number`. Ranks that run different ones would mix up what they send."""
        self.order = _followed(self.order, number)

    def note_step(self, number: int) -> None:
        self.steps = _followed(self.steps, number)

    def has_gradients(self, parameters: Iterable[nn.Parameter]) -> bool:
        waiting_groups = set()
        for p in parameters:
            group = self.sharded.get(id(p))
            if p.grad is not None and (group is None or id(p) in self.used):
                return True
            if group is not None and group in self.waiting:
                waiting_groups.add(group)
        return any(group.keeps_gradients() for group in waiting_groups)

    def let_graphs_go(self) -> None:
        """Groups that graphs of gradients refer to reshard after backwards again: no graph is used any more."""
        for group in self.graphs:
            group.reshard_after_backward = True
        self.graphs.clear()

    def drop_what_waits(self) -> None:
        for group in self.waiting:
            group.drop_gradients()
        self.waiting.clear()
        self.used.clear()


def _followed(order: int, number: int) -> int:
    return (order * 1_000_003 + number + 1) & 0xFF_FFFF  # small, since its squares are summed over ranks
