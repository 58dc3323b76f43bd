"""Adafactor for sharded parameters: the statistics of rows and columns are those of whole parameters.

Every rank sums the squares of its shards, and two packed all-reduces a step make the sums whole: one for rows, columns
and the parameters' norms, one for the norms of the updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dream_trainer.compat.pytorch import local_tensor, shard_dim
from dream_trainer.modules.shards import local_gradient, local_indices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` that can step DTensors; without one it steps bit for bit as that.

    Arguments and state are the same. `row_var` and `col_var` are whole on every rank, so that they do not depend on the
    number of ranks; a parameter of more than two dimensions (factored along its last two) has large ones.
    """

    _places: dict[nn.Parameter, _Place]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._places = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer."""
        super().add_param_group(param_group)
        self._places = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Changes every parameter that has a gradient. Every rank calls it, with gradients of the same parameters."""
        from torch.distributed.tensor import DTensor

        if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)  # type: ignore[no-untyped-call]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        teams: dict[tuple[Any, ...], list[_Update]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = self._begin(p, group)
                    teams.setdefault((update.place.groups, update.gradient.device, update.sum_dtype), []).append(update)
        for (groups, _, _), updates in teams.items():
            _step_team(groups, updates)
        torch.autograd.graph.increment_version([u.parameter for updates in teams.values() for u in updates])
        return loss

    def _begin(self, parameter: nn.Parameter, group: dict[str, Any]) -> _Update:
        """What of the parameter this rank steps; makes its state, as PyTorch's does."""
        if parameter not in self._places:
            self._places[parameter] = _place(parameter)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.get_default_dtype())
            if parameter.ndim > 1:
                *leading, rows, columns = parameter.shape
                local = local_tensor(parameter)
                state["row_var"] = local.new_zeros(*leading, rows, 1)
                state["col_var"] = local.new_zeros(*leading, 1, columns)
            else:
                state["variance"] = torch.zeros_like(parameter, requires_grad=False)
        for key in ("row_var", "col_var"):
            if key in state:
                state[key] = _whole(state[key], parameter)
        gradient = local_gradient(parameter)
        return _Update(parameter, -gradient if group["maximize"] else gradient, state, group, self._places[parameter])


@dataclass(frozen=True)
class _Place:
    """Where this rank's shard lies in its parameter.

    Attributes:
        groups: Ranks to sum over, one group after the other, for what is whole.
        indices: Along each dimension those that this rank has.
    """

    groups: tuple[ProcessGroup, ...]
    indices: list[Tensor]

    def of(self, *flattened: int) -> tuple[Tensor, ...]:
        """Picks this rank's part of a tensor that has one element along the dimensions `flattened`."""
        chosen = list(self.indices)
        for dim in flattened:
            chosen[dim] = chosen[dim].new_zeros(1)
        return tuple(
            index.view([-1 if d == dim else 1 for d in range(len(chosen))]) for dim, index in enumerate(chosen)
        )


def _place(parameter: nn.Parameter) -> _Place:
    from torch.distributed.tensor import DTensor

    device = local_tensor(parameter).device
    if not isinstance(parameter, DTensor):
        return _Place((), [torch.arange(length, device=device) for length in parameter.shape])
    mesh = parameter.device_mesh
    cut = [i for i, placement in enumerate(parameter.placements) if shard_dim(placement) is not None]
    indices = [local_indices(parameter, dim).to(device) for dim in range(parameter.ndim)]
    return _Place(tuple(mesh.get_group(i) for i in cut if mesh.size(i) > 1), indices)


def _whole(statistic: Tensor, parameter: nn.Parameter) -> Tensor:
    """As a DTensor with a copy on each rank, if the parameter is one: so a checkpoint takes it from one of them."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(parameter, DTensor):
        return statistic
    mesh = parameter.device_mesh
    if statistic.device.type != mesh.device_type:  # offloaded, where a DTensor over this mesh would move it
        return statistic
    everywhere = [Replicate()] * mesh.ndim
    if not isinstance(statistic, DTensor):
        return DTensor.from_local(statistic, mesh, everywhere, run_check=False)
    if any(not placement.is_replicate() for placement in statistic.placements):
        return statistic.redistribute(placements=everywhere)
    return statistic


@dataclass
class _Update:
    """One parameter's step on this rank, while it is made."""

    parameter: nn.Parameter
    gradient: Tensor
    state: dict[str, Tensor]
    group: dict[str, Any]
    place: _Place
    update: Tensor = field(init=False)

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.gradient.dtype, torch.float32)

    @property
    def sizes(self) -> list[int]:
        """Of what is summed over ranks first: the parameter's square, and those of rows and columns."""
        if self.gradient.ndim < 2:
            return [1]
        return [1, self.state["row_var"].numel(), self.state["col_var"].numel()]

    def give_squares(self, sums: list[Tensor]) -> None:
        """Adds this rank's squares to what is to be summed."""
        sums[0].add_(torch.linalg.vector_norm(local_tensor(self.parameter), dtype=sums[0].dtype).square())
        if self.gradient.ndim < 2:
            return
        for total, key, dim in ((sums[1], "row_var", -1), (sums[2], "col_var", -2)):
            squares = torch.linalg.vector_norm(self.gradient, dim=dim, keepdim=True, dtype=total.dtype).square_()
            total.view(self.state[key].shape)[self.place.of(dim)] = squares

    def take_squares(self, sums: list[Tensor], square: Tensor) -> None:
        """Moves the statistics, and makes the update but for its length, whose square goes into `square`."""
        step, group = self.state["step"].add_(1).item(), self.group
        weight = step ** group["beta2_decay"]
        least = group["eps"][0]
        if least is None:
            least = torch.finfo(self.parameter.dtype).eps
        if self.gradient.ndim < 2:
            variance = local_tensor(self.state["variance"])
            variance.lerp_(self.gradient.square(), weight)
            estimate = variance.clone()
        else:
            row, column = local_tensor(self.state["row_var"]), local_tensor(self.state["col_var"])
            row.lerp_((sums[1].view(row.shape) / self.parameter.shape[-1]).to(row.dtype), weight)
            column.lerp_((sums[2].view(column.shape) / self.parameter.shape[-2]).to(column.dtype), weight)
            mean = row.mean(dim=-2, keepdim=True).clamp_(min=least)
            estimate = row[self.place.of(-1)] @ column[self.place.of(-2)]
            estimate.div_(mean[self.place.of(-1, -2)])
        self.update = estimate.clamp_(min=least * least).rsqrt_().mul_(self.gradient)
        square.add_(torch.linalg.vector_norm(self.update, dtype=square.dtype).square())

    def move(self, parameter_square: Tensor, update_square: Tensor) -> None:
        """Decays the parameter, and moves it."""
        group, root = self.group, self.parameter.numel() ** 0.5
        rate = float(group["lr"])
        size = (parameter_square.sqrt() / root).clamp_(min=group["eps"][1])
        excess = (update_square.sqrt() / (root * group["d"])).clamp_(min=1.0)
        factor = size * min(rate, 1 / self.state["step"].item() ** 0.5) / excess
        local = local_tensor(self.parameter)
        if group["weight_decay"] != 0:
            local.mul_(1 - rate * group["weight_decay"])
        local.sub_(self.update.mul_(factor))


def _step_team(groups: tuple[ProcessGroup, ...], updates: list[_Update]) -> None:
    """Steps parameters that are cut over the same ranks."""
    import torch.distributed as dist

    first = updates[0]
    sizes = [size for update in updates for size in update.sizes]
    flat = torch.zeros(sum(sizes), dtype=first.sum_dtype, device=first.gradient.device)
    views = iter(flat.split(sizes))
    sums = [[next(views) for _ in update.sizes] for update in updates]
    for update, own in zip(updates, sums, strict=True):
        update.give_squares(own)
    for group in groups:
        dist.all_reduce(flat, group=group)
    squares = flat.new_zeros(len(updates))
    for update, own, square in zip(updates, sums, squares, strict=True):
        update.take_squares(own, square)
    for group in groups:
        dist.all_reduce(squares, group=group)
    for update, own, square in zip(updates, sums, squares, strict=True):
        update.move(own[0].squeeze(), square)
