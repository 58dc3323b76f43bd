"""Experts that ranks share: each has the weights of a part of them, and rows go to the rank that has their expert.

All ranks run each layer equally often: sending and giving back are collectives, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dream_trainer.compat.pytorch import has_values, is_dtensor
from dream_trainer.distributed.world import gathered_rows, linear
from dream_trainer.errors import ConfigError
from dream_trainer.parallel.micro_batches import even_parts
from dream_trainer.parallel.plain_run import plain
from dream_trainer.parallel.sharding import dim_of_part


class ExpertExchange:
    """Takes rows to the ranks that have their experts, and back.

    Args:
        mesh: One-dimensional mesh of the expert-parallel ranks; rank r has the r-th part of the experts.

    Example:
        ```python
        def forward(self, rows, counts):  # of a layer of experts, sorted by expert
            if self.exchange is None:
                return self.compute(rows, counts, self.weight)
            own = self.exchange.send(rows, counts)
            out = self.compute(own.rows, own.counts, self.exchange.local(self.weight))
            return own.give_back(out)
        ```
    """

    is_off = False  # whether no expert gets a row, and nothing is sent

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._size = mesh.size()
        self._alike: Alike | None = None

    def divide_rows(self, mesh: DeviceMesh) -> None:
        """From now on the ranks of `mesh`, which all have the same rows, send a part each and share what comes back."""
        self._alike = Alike(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def local(self, weight: Tensor) -> Tensor:
        """This rank's experts of a stacked weight, with gradients."""
        assert is_dtensor(weight)  # since `split_experts`
        return weight.to_local()

    def send(self, rows: Tensor, counts: Tensor) -> Visitors:
        """Sends `rows`, sorted by expert, to the ranks of their experts; `counts` has the number of rows per expert."""
        n_rows = len(rows)
        if self.is_off:
            none = counts.new_zeros(len(counts) // self._size)
            return Visitors(rows[:0], none, none[:0], [], [], None, None, n_rows)
        if self._alike is not None:
            rows, counts = self._alike.part(rows), self._alike.part_of_counts(counts)
        from_ranks = torch.empty_like(counts)
        dist.all_to_all_single(from_ranks, counts, group=self._group)
        to_ranks, from_ranks = counts.view(self._size, -1), from_ranks.view(self._size, -1)
        if has_values(counts):
            leaving, coming = torch.stack((to_ranks.sum(1), from_ranks.sum(1))).tolist()
        else:  # without values that would say how many
            leaving = coming = even_parts(len(rows), self._size)
        received = _sent(rows, coming, leaving, self._group)
        experts = torch.arange(1, from_ranks.shape[1] + 1, device=rows.device).repeat(self._size)
        of_rows = experts.repeat_interleave(from_ranks.flatten(), output_size=sum(coming))
        order = of_rows.sort(stable=True).indices
        own = received.index_select(0, order)
        return Visitors(own, from_ranks.sum(0), order, coming, leaving, self._group, self._alike, n_rows)


@dataclass(frozen=True)
class Visitors:
    """The rows of all ranks that are for this one's experts."""

    rows: Tensor  # `[n, ...]`, sorted by expert
    counts: Tensor  # `[experts of this rank]`, int64: rows of each
    _order: Tensor
    _coming: list[int]
    _leaving: list[int]
    _group: ProcessGroup | None  # None if nothing was sent
    _alike: Alike | None
    _n_rows: int

    def give_back(self, rows: Tensor) -> Tensor:
        """Sends the results for `rows`, in their order, to the ranks they came from; a collective."""
        if self._group is None:
            return rows.new_zeros((self._n_rows, *rows.shape[1:])).requires_grad_(rows.requires_grad)
        by_rank = torch.empty_like(rows).index_copy_(0, self._order, rows)
        own = _sent(by_rank, self._leaving, self._coming, self._group)
        return own if self._alike is None else self._alike.whole(own, self._n_rows)


@dataclass(frozen=True)
class Alike:
    group: ProcessGroup
    place: int  # this one's
    size: int

    def part(self, rows: Tensor) -> Tensor:
        """This rank's part: every rank has an equal share of each expert's rows, which are neighbours."""
        # Gradients only cover this part, and all ranks have the same rows: backward gathers.
        return linear(rows, self._own_rows, partial(self._all_rows, n_rows=len(rows)))

    def part_of_counts(self, counts: Tensor) -> Tensor:
        """How many rows of each expert are in this rank's part, given those of all rows."""
        before = (counts.cumsum(0) + (self.size - 1 - self.place)) // self.size
        return before.diff(prepend=before.new_zeros(1))

    def whole(self, part: Tensor, n_rows: int) -> Tensor:
        """All `n_rows` rows, joined from each rank's part; a collective."""
        # All ranks have the same gradients, so backward takes this rank's part.
        return linear(part, partial(self._all_rows, n_rows=n_rows), self._own_rows)

    def _own_rows(self, rows: Tensor) -> Tensor:
        return rows[self.place :: self.size].contiguous()

    def _all_rows(self, part: Tensor, n_rows: int) -> Tensor:
        most, of_row = -(-n_rows // self.size), part.shape[1:]
        padded = torch.cat((part, part.new_zeros((most - len(part), *of_row)))) if len(part) < most else part
        return gathered_rows(padded, self.group).view(self.size, most, *of_row).transpose(0, 1).flatten(0, 1)[:n_rows]


def _exchanged(rows: Tensor, coming: list[int], leaving: list[int], group: ProcessGroup) -> Tensor:
    """Exchanges rows: `leaving` counts rows sent to each rank, `coming` rows received from it."""
    received = rows.new_empty((sum(coming), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), coming, leaving, group=group)
    return received


def _sent(rows: Tensor, coming: list[int], leaving: list[int], group: ProcessGroup) -> Tensor:
    """The same with gradients, which go the other way."""
    return linear(
        rows,
        partial(_exchanged, coming=coming, leaving=leaving, group=group),
        partial(_exchanged, coming=leaving, leaving=coming, group=group),
    )


def split_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves each rank of `mesh` its part of the experts whose stacked weights a module has as its parameters.

    Args:
        experts: A module whose own parameters are all `[n_experts, ...]`; they become DTensors. Its attribute
            `exchange` is then the `ExpertExchange` for its forward; it is None if each rank has all experts.
        mesh: The mesh that `apply_expert_parallel` receives.

    Raises:
        ConfigError: The module has no direct parameters, or the ranks cannot share the experts evenly.
    """
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    own = list(experts.named_parameters(recurse=False))
    if not own:
        raise ConfigError(
            f"{type(experts).__name__} has no direct parameters to share by experts. Give split_experts the module "
            "that has the stacked weights."
        )
    for name, weight in own:
        if isinstance(weight, DTensor):
            raise ConfigError(
                f"{type(experts).__name__}.{name} is split already. Leave experts out of the plan of "
                "apply_tensor_parallel: the ranks that share layers divide their rows."
            )
        if weight.ndim == 0 or weight.shape[0] % mesh.size():
            raise ConfigError(
                f"{type(experts).__name__}.{name} has shape {list(weight.shape)}, and expert_parallel={mesh.size()} "
                "ranks cannot share its first dimension, the experts, evenly. Use a number of experts that it divides."
            )
        part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
    vars(experts)["exchange"] = ExpertExchange(mesh)


@contextmanager
def without_exchange(model: nn.Module) -> Iterator[None]:
    """Inside, forwards of `model` give results of the right shapes without communication: no expert gets a token."""
    exchanges = _exchanges(model).values()
    for exchange in exchanges:
        exchange.is_off = True
    try:
        yield
    finally:
        for exchange in exchanges:
            exchange.is_off = False


@contextmanager
def whole_experts(model: nn.Module) -> Iterator[None]:
    """Inside, each rank has the weights of all experts of `model`, and forwards exchange nothing. No gradients."""
    exchanges = _exchanges(model)
    own = [(part, name, weight) for part in exchanges for name, weight in part.named_parameters(recurse=False)]
    split = [(part, name, weight) for part, name, weight in own if is_shared_by_experts(weight)]
    for part, name, weight in split:
        part.register_parameter(name, nn.Parameter(plain(weight), requires_grad=False))
    for part in exchanges:
        vars(part)["exchange"] = None
    try:
        yield
    finally:
        for part, name, weight in split:
            part.register_parameter(name, weight)
        for part, exchange in exchanges.items():
            vars(part)["exchange"] = exchange


def _exchanges(model: nn.Module) -> dict[nn.Module, ExpertExchange]:
    found = {part: vars(part).get("exchange") for part in model.modules()}
    return {part: exchange for part, exchange in found.items() if isinstance(exchange, ExpertExchange)}


def is_shared_by_experts(parameter: nn.Parameter) -> bool:
    return dim_of_part(parameter, "ep") is not None


# -- Where models' experts lie on the ranks, once `apply_expert_parallel` has split them: over ep, and over fsdp.


def modules_of_experts(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules with own parameters that ranks share by experts."""
    parts = dict.fromkeys(part for model in models for part in model.modules())
    return [part for part in parts if any(map(is_shared_by_experts, part.parameters(recurse=False)))]


def shard_experts(models: Mapping[str, nn.Module], mesh: DeviceMesh, config: dict[str, Any]) -> None:
    """Wraps experts with `fully_shard`, in separate groups, to shard them beyond the expert-parallel ranks."""
    from torch.distributed.fsdp import fully_shard

    shards = mesh["dp_shard"].size()
    if shards == 1:  # left out of `fully_shard`: `step` averages what copies there are
        return
    dims = ("dp_replicate", "dp_shard") if mesh["dp_replicate"].size() > 1 else ("dp_shard",)
    for module in modules_of_experts(models.values()):
        placement = partial(_placement, shards=shards, owner=type(module).__name__)
        fully_shard(module, mesh=mesh[dims], shard_placement_fn=placement, **config)


def _placement(parameter: nn.Parameter, *, shards: int, owner: str) -> Any:
    """Along a dimension that can be shared evenly; the first is that of the experts."""
    from torch.distributed.tensor import Shard

    for dim in range(1, parameter.ndim):
        if parameter.shape[dim] % shards == 0:
            return Shard(dim)
    raise ConfigError(
        f"a weight {list(parameter.shape)} of {owner} cannot be sharded evenly over {shards} ranks, in addition to its "
        "experts over expert_parallel. Use a width that they divide, or another dp_shard."
    )
