"""Global gradient norm and scaling over any mix of sharded, replicated and plain parameters, on local shards.

The square of an element that several ranks hold is divided by the number of its copies before one all-reduce. A
parameter that only some ranks used has a gradient of zero on the others; one that no rank used has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from dream_trainer.compat.pytorch import foreach_mul_, foreach_norm, is_dtensor, local_gradients
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.distributed.world import World
from dream_trainer.gradient_state import GradientState
from dream_trainer.modules.precision import reduce_dtype
from dream_trainer.optim.muon import Muon
from dream_trainer.trainer.registry import parameters_of
from dream_trainer.trainer.step.buckets import Averaging, OverlappedAveraging, make_buckets


@dataclass(frozen=True)
class ParameterGroup:
    copies: int  # number of ranks of a step that hold each element
    is_sharded: bool  # whether they are DTensors
    divisor: float  # remaining divisor after a backward has averaged gradients over ranks
    is_counted: bool  # a norm over stages takes their squares from this rank
    parameters: list[nn.Parameter]

    def gradients(self) -> list[Tensor]:
        if self.is_sharded:
            return local_gradients(self.parameters)
        return [p.grad for p in self.parameters if p.grad is not None]


@dataclass(frozen=True)
class StepPlan:
    """Facts about a set of optimizers that `step` needs, computed once."""

    parameters: list[nn.Parameter]  # all their parameters, each once
    groups: list[ParameterGroup]  # the same, grouped by how many ranks hold each of their elements
    sums: list[int]  # places of those groups whose gradients are still to be divided
    tied: list[tuple[nn.Parameter, tuple[int, ...]]]  # with all ranks that have a copy
    averaging: Averaging  # of the gradients that no backward reduces over ranks; of none at world size 1
    is_whole: bool  # averaged gradients are equal to the bit on all ranks
    sharded: list[nn.Parameter]  # parameters whose gradients a backward reduces, each rank keeping its shard
    sharded_ids: frozenset[int]
    guards_itself: bool  # whether every optimizer skips a step on the device if its `found_inf` is set
    n_groups: tuple[int, ...]  # parameter count per optimizer group when the plan was made, to notice `add_param_group`
    dtype: torch.dtype  # the widest dtype among the parameters; the norm is computed in it
    one_dtype: bool  # whether all parameters have it
    is_mixed: bool  # whether DTensors and plain parameters are stepped together
    ranks: dist.ProcessGroup | None  # those that step together; None for all


def group_sizes(optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    """Parameter count of each group, which changes when parameters are added."""
    return tuple([len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups])


def plan_step(
    optimizers: Sequence[Optimizer], world: World, gradients: GradientState, devices: DeviceParameters
) -> StepPlan:
    """Makes the plan for stepping `optimizers` together; `devices` says how gradients cross ranks."""
    # Frozen ones too: they may be unfrozen later, and cost nothing while they have no gradient.
    by_id = {id(p): p for p in parameters_of(*optimizers)}
    parameters = list(by_id.values())
    kinds: dict[tuple[int, bool, float, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        part = gradients.part(parameter)
        # A part's is the sum over the ranks of all parts; a bucket would have divided by all ranks.
        is_sum = part is not None and (id(parameter) in gradients.sharded or part.copies is None)
        divisor = part.divisor if part is not None and is_sum else 1
        first, *_ = gradients.tied.get(id(parameter), (world.stage_rank,))
        kind = copies_of(parameter, world.step_size), is_dtensor(parameter), divisor, first == world.stage_rank
        kinds.setdefault(kind, []).append(parameter)
    dtypes = {p.dtype for p in parameters}
    # A rank without parameters has the norm of the other stages', of whatever type.
    dtype = torch.float64 if world.stages > 1 and not parameters else torch.float32
    for other in dtypes:
        dtype = torch.promote_types(dtype, torch.zeros((), dtype=other).abs().dtype)
    sharded = [p for p in parameters if id(p) in gradients.sharded]
    # Backward comes to the last ones first.
    overlaps = devices.overlap_reduce and world.step_size > 1
    buckets = make_buckets(parameters[::-1] if overlaps else parameters, world, gradients, reduce_dtype(devices))
    return StepPlan(
        parameters=parameters,
        groups=[ParameterGroup(*kind, members) for kind, members in kinds.items()],
        averaging=OverlappedAveraging(buckets, world) if overlaps else Averaging(buckets, world),
        sums=[place for place, (_, _, divisor, _) in enumerate(kinds) if divisor != 1],
        tied=[(by_id[key], ranks) for key, ranks in gradients.tied.items() if key in by_id],
        is_whole=world.data_copies == 1 and all(copies == world.step_size for copies, *_ in kinds),
        sharded=sharded,
        sharded_ids=frozenset(map(id, sharded)),
        guards_itself=all(guards_itself(o, gradients.shard_of) for o in optimizers),
        n_groups=group_sizes(optimizers),
        dtype=dtype,
        one_dtype=len(dtypes) == 1,
        is_mixed=len({is_dtensor(gradients.shard_of.get(id(p), p)) for p in parameters}) == 2,
        ranks=world.step_group,
    )


def guards_itself(optimizer: Optimizer, shard_of: Mapping[int, nn.Parameter]) -> bool:
    """Whether `found_inf` makes the optimizer leave weights and state unchanged, on the device, without a host read."""
    if type(optimizer) is Muon:
        return True
    is_sharded = any(is_dtensor(shard_of.get(id(p), p)) for p in parameters_of(optimizer))
    kinds = (Adam, AdamW) if is_sharded else (Adam, AdamW, SGD, Adagrad)
    return type(optimizer) in kinds and all(group.get("fused") for group in optimizer.param_groups)


def copies_of(parameter: nn.Parameter, n_ranks: int) -> int:
    """How many of `n_ranks` ranks hold each element of `parameter`: all of the world, or those of a step."""
    if not is_dtensor(parameter):
        return n_ranks
    cuts = 1
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate() and not placement.is_partial():
            cuts *= parameter.device_mesh.size(dim)
    return n_ranks // cuts


def gradients_of(plan: StepPlan) -> list[list[Tensor]]:
    return [group.gradients() for group in plan.groups]


def local_norm(plan: StepPlan, grads: list[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of this rank's gradients, 0-dim on `device`."""
    if not grads:
        return torch.zeros((), dtype=plan.dtype, device=device)
    norms = foreach_norm(grads)
    if not plan.one_dtype:
        norms = tuple([norm.to(plan.dtype) for norm in norms])
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def global_norm(
    plan: StepPlan,
    grads: list[list[Tensor]],
    weight: Tensor | float | None,
    device: torch.device,
    lacking: Sequence[int] = (),
) -> tuple[Tensor, Tensor | None, list[int]]:
    """Norm and total weight, 0-dim, and which of `lacking` no rank used (a wait for the device); one all-reduce."""
    sums = torch.zeros(2 + len(plan.sharded), dtype=torch.float64, device=device)
    sums[2:] = 1.0
    if lacking:
        sums[[2 + place for place in lacking]] = 0.0
    for group, group_gradients in zip(plan.groups, grads, strict=True):
        if group.is_counted:
            sums[0] += local_norm(plan, group_gradients, device).double().square() / group.copies
    if weight is not None:
        sums[1] = weight
    dist.all_reduce(sums, group=plan.ranks)
    there = sums[2:].tolist() if lacking else []
    unused = [place for place in lacking if not there[place]]
    return sums[0].sqrt().to(plan.dtype), sums[1] if weight is not None else None, unused


def norm_over_stages(norm: Tensor, stages: dist.ProcessGroup) -> Tensor:
    """The 2-norm over all stages, of each one's norm; a collective."""
    square = norm.double().square()
    dist.all_reduce(square, group=stages)
    return square.sqrt().to(norm.dtype)


def scale_gradients(plan: StepPlan, grads: list[list[Tensor]], factor: Tensor) -> None:
    """Multiplies the gradients in place by a 0-dim tensor; a Python float would cost three times more."""
    for group_gradients in filter(None, grads):
        if plan.one_dtype:
            foreach_mul_(group_gradients, factor.to(group_gradients[0].dtype))
        else:
            for grad in group_gradients:
                grad.mul_(factor.to(grad.dtype))
