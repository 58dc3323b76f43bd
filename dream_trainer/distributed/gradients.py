"""Global gradient norm and scaling over any mix of sharded, replicated and plain parameters.

Everything works on this rank's local shards (TORCH.md section 14: four times cheaper than on DTensors). An element that
several ranks hold is counted once, by dividing its square by the number of its copies before one all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from dream_trainer.distributed.torch_compat import foreach_mul_, foreach_norm, local_gradients

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one kind.

    Attributes:
        copies: Number of ranks that hold each element.
        is_sharded: Whether they are DTensors.
        parameters: The parameters.
    """

    copies: int
    is_sharded: bool
    parameters: list[nn.Parameter]

    def gradients(self) -> list[Tensor]:
        """This rank's part of the gradients that are there."""
        if self.is_sharded:
            return local_gradients(self.parameters)
        return [p.grad for p in self.parameters if p.grad is not None]


@dataclass(frozen=True)
class StepPlan:
    """What `step` needs to know of a set of optimizers, worked out once.

    Attributes:
        parameters: All their parameters, each once.
        groups: The same, grouped by how many ranks hold each of their elements.
        unsynced: Parameters that no wrapper reduces over ranks; empty at world size 1.
        guards_itself: Whether every optimizer skips on the device when told `found_inf`.
        n_groups: Parameter count per optimizer group when this was worked out, to notice `add_param_group`.
        dtype: The widest dtype among the parameters, in which the norm is taken.
        one_dtype: Whether they share it.
    """

    parameters: list[nn.Parameter]
    groups: list[ParameterGroup]
    unsynced: list[nn.Parameter]
    guards_itself: bool
    n_groups: tuple[int, ...]
    dtype: torch.dtype
    one_dtype: bool


def group_sizes(optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    """Parameter count of each group, which changes when parameters are added."""
    return tuple([len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups])


def plan_step(optimizers: Sequence[Optimizer], world_size: int) -> StepPlan:
    """Works out the plan for stepping `optimizers` together."""
    from torch.distributed.tensor import DTensor

    # Frozen ones too: they may be unfrozen later, and cost nothing while they have no gradient.
    unique = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
    parameters = list(unique.values())
    kinds: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((copies_of(parameter, world_size), isinstance(parameter, DTensor)), []).append(parameter)
    dtypes = {p.dtype for p in parameters}
    dtype = torch.float32
    for other in dtypes:
        dtype = torch.promote_types(dtype, torch.zeros((), dtype=other).abs().dtype)
    return StepPlan(
        parameters=parameters,
        groups=[ParameterGroup(*kind, members) for kind, members in kinds.items()],
        unsynced=[p for p in parameters if world_size > 1 and not isinstance(p, DTensor)],
        guards_itself=all(guards_itself(o) for o in optimizers),
        n_groups=group_sizes(optimizers),
        dtype=dtype,
        one_dtype=len(dtypes) == 1,
    )


def guards_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer leaves weights and state alone on the device when told `found_inf`, without a host read."""
    from torch.distributed.tensor import DTensor

    sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    kinds = (Adam, AdamW) if sharded else (Adam, AdamW, SGD, Adagrad)
    return type(optimizer) in kinds and all(group.get("fused") for group in optimizer.param_groups)


def copies_of(parameter: nn.Parameter, world_size: int) -> int:
    """How many ranks of the world hold each element of `parameter`."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return world_size
    mesh = parameter.device_mesh
    cuts = 1
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate() and not placement.is_partial():
            cuts *= mesh.size(dim)
    return world_size // cuts


def gradients_of(plan: StepPlan) -> list[list[Tensor]]:
    """This rank's part of the gradients that are there, group by group."""
    return [group.gradients() for group in plan.groups]


def average_unsynced(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Averages over all ranks the gradients of parameters that no wrapper reduces, in one collective per dtype.

    A rank without a gradient that others have counts as zero; a parameter without one on all ranks stays without.
    """
    import torch.distributed as dist

    there = world.all_reduce(torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8), "max").tolist()
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for p, is_there in zip(parameters, there, strict=True):
        if is_there:
            by_dtype.setdefault(p.dtype, []).append(p)
    for members in by_dtype.values():
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat)
        flat /= world.world_size
        for p, mean in zip(members, flat.split([p.numel() for p in members]), strict=True):
            p.grad = mean.view_as(p)


def local_norm(plan: StepPlan, grads: list[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of this rank's gradients, 0-dim on `device`."""
    if not grads:
        return torch.zeros((), dtype=plan.dtype, device=device)
    norms = foreach_norm(grads)
    if not plan.one_dtype:
        norms = tuple([norm.to(plan.dtype) for norm in norms])
    return torch.linalg.vector_norm(torch.stack(norms))


def global_norm(
    plan: StepPlan, grads: list[list[Tensor]], weight: Tensor | float | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The 2-norm over all ranks' gradients, each element once, and the sum of `weight` over ranks.

    Args:
        plan: The step's plan.
        grads: From `gradients_of`.
        weight: This rank's total weight, or None when nothing is weighted.
        device: Where the collective runs.

    Returns:
        Norm and total weight, 0-dim tensors; one all-reduce for both.
    """
    import torch.distributed as dist

    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for group, own in zip(plan.groups, grads, strict=True):
        sums[0] += local_norm(plan, own, device).double().square() / group.copies
    if weight is not None:
        sums[1] = weight
    dist.all_reduce(sums)
    return sums[0].sqrt().to(plan.dtype), sums[1] if weight is not None else None


def scale_gradients(plan: StepPlan, grads: list[list[Tensor]], factor: Tensor) -> None:
    """Multiplies the gradients in place by a 0-dim tensor; by a Python float it would cost three times as much."""
    for own in grads:
        if not own:
            continue
        if plan.one_dtype:
            foreach_mul_(own, factor if factor.dtype is own[0].dtype else factor.to(own[0].dtype))
        else:
            for grad in own:
                grad.mul_(factor.to(grad.dtype))
