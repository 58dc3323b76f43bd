"""Experts that ranks share: each has the weights of a part of them, and rows go to the rank that has their expert.

Ranks of a group have samples of their own, and all run each layer as often: sending and giving back are collectives of
the group, in forward and in backward. No row is dropped, so their numbers are read on the host, once per layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd import Function

from dream_trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

EXPERT_DIM = "ep"


class ExpertExchange:
    """Takes rows to the ranks that have their experts, and back.

    Args:
        mesh: Of the one dimension of the ranks that share the experts; rank r has the r-th part of them.

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

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._size = mesh.size()

    def local(self, weight: Tensor) -> Tensor:
        """This rank's experts of a stacked weight, with gradients."""
        from torch.distributed.tensor import DTensor

        assert isinstance(weight, DTensor)  # since `split_experts`
        return weight.to_local()

    def send(self, rows: Tensor, counts: Tensor) -> Visitors:
        """Sends each row to the rank of its expert; a collective.

        Args:
            rows: `[n, ...]`, sorted by expert.
            counts: `[n_experts]`, int64: rows of each of all experts.
        """
        import torch.distributed as dist

        from_ranks = torch.empty_like(counts)
        dist.all_to_all_single(from_ranks, counts, group=self._group)
        to_ranks, from_ranks = counts.view(self._size, -1), from_ranks.view(self._size, -1)
        leaving, coming = torch.stack((to_ranks.sum(1), from_ranks.sum(1))).tolist()
        received: Tensor = _Exchanged.apply(rows, coming, leaving, self._group)  # type: ignore[no-untyped-call]
        experts = torch.arange(1, from_ranks.shape[1] + 1, device=rows.device).repeat(self._size)
        of_rows = experts.repeat_interleave(from_ranks.flatten(), output_size=sum(coming))
        order = of_rows.sort(stable=True).indices
        return Visitors(received[order], from_ranks.sum(0), order, coming, leaving, self._group)


@dataclass(frozen=True)
class Visitors:
    """The rows of all ranks that are for this one's experts.

    Attributes:
        rows: `[n, ...]`, sorted by expert.
        counts: `[experts of this rank]`, int64: rows of each.
    """

    rows: Tensor
    counts: Tensor
    _order: Tensor
    _coming: list[int]
    _leaving: list[int]
    _group: ProcessGroup

    def give_back(self, rows: Tensor) -> Tensor:
        """Sends what came out for `rows`, in their order, to where they came from; a collective.

        Returns:
            `[n, ...]`, in the order in which that rank had sent its own.
        """
        by_rank = torch.empty_like(rows).index_copy(0, self._order, rows)
        own: Tensor = _Exchanged.apply(by_rank, self._leaving, self._coming, self._group)  # type: ignore[no-untyped-call]
        return own


class _Exchanged(Function):
    """Rows by rank; backward is the same the other way, so that gradients have gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, coming: list[int], leaving: list[int], group: ProcessGroup) -> Tensor:
        import torch.distributed as dist

        ctx.sizes = leaving, coming, group
        received = rows.new_empty((sum(coming), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), coming, leaving, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None, None]:
        return _Exchanged.apply(gradients[0], *ctx.sizes), None, None, None  # type: ignore[no-untyped-call]


def split_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves each rank of `mesh` its part of the experts whose stacked weights a module has as its parameters.

    Args:
        experts: Each of its own parameters is `[n_experts, ...]`; they become DTensors. From now on its attribute
            `exchange` is what its forward exchanges rows with; it is None where each rank has all experts.
        mesh: As `apply_expert_parallel` is given it.

    Raises:
        ConfigError: It has no parameters of its own, or the ranks cannot share the experts evenly.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    own = list(experts.named_parameters(recurse=False))
    if not own:
        raise ConfigError(
            f"{type(experts).__name__} has no parameters of its own to share by experts. Give split_experts the module "
            "that has the stacked weights."
        )
    for name, weight in own:
        if weight.ndim == 0 or weight.shape[0] % mesh.size():
            raise ConfigError(
                f"{type(experts).__name__}.{name} has shape {list(weight.shape)}, and expert_parallel={mesh.size()} "
                "ranks cannot share its first dimension, the experts, evenly. Use a number of experts that it divides."
            )
        part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
    vars(experts)["exchange"] = ExpertExchange(mesh)


@contextmanager
def whole_experts(model: nn.Module) -> Iterator[None]:
    """Inside, each rank has the weights of all experts of `model`, and forwards exchange nothing. No gradients.

    What `fully_shard` has of them is gathered already.
    """
    attributes = {part: vars(part) for part in model.modules()}
    exchanges = {
        part: of["exchange"] for part, of in attributes.items() if isinstance(of.get("exchange"), ExpertExchange)
    }
    own = [(part, name, weight) for part in exchanges for name, weight in part.named_parameters(recurse=False)]
    split = [(part, name, weight) for part, name, weight in own if is_shared_by_experts(weight)]
    for part, name, weight in split:
        part.register_parameter(name, nn.Parameter(_whole(weight), requires_grad=False))
    for part in exchanges:
        attributes[part]["exchange"] = None
    try:
        yield
    finally:
        for part, name, weight in split:
            part.register_parameter(name, weight)
        for part, exchange in exchanges.items():
            attributes[part]["exchange"] = exchange


def _whole(weight: nn.Parameter) -> Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    with torch.no_grad():
        return weight.full_tensor()


def is_shared_by_experts(parameter: nn.Parameter) -> bool:
    """Whether ranks have parts of `parameter` by experts."""
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor) and EXPERT_DIM in (parameter.device_mesh.mesh_dim_names or ())
