"""Gradients over ranks: averaged in buckets, their norm and scaling, and the plan of a step that says how.

The collectives follow from the trained parameters, not from what a rank used. A bucket is a flat tensor: gradients of
whole parameters, a number for each that says whether the rank has one, and in the last bucket the window's weight.

The norm is over any mix of sharded, replicated and plain parameters, on local shards. The square of an element that
several ranks hold is divided by the number of its copies before one all-reduce. A parameter that only some ranks used
has a gradient of zero on the others; one that no rank used has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from dream_trainer.compat.pytorch import (
    foreach_copy_,
    foreach_div_,
    foreach_mul_,
    foreach_norm,
    is_dtensor,
    local_tensor,
    local_tensors,
    with_local,
    write_count,
)
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.distributed.world import World
from dream_trainer.errors import StepError
from dream_trainer.gradient_state import GradientState
from dream_trainer.modules.precision import reduce_dtype
from dream_trainer.optim.muon import Muon
from dream_trainer.trainer.registry import parameters_of

T = TypeVar("T", bound=Tensor)
K = TypeVar("K")

BUCKET_BYTES = 25 * 2**20
_AT_ONCE = 2  # one is packed while another is summed
_KEPT_FROM = 8 * 2**20  # less is taken from what activations left free, whose pages the process has already
_PARTS = 3  # float32 values that add up to a float64


@dataclass(frozen=True, eq=False)
class Bucket:
    dtype: torch.dtype  # the type that they are sent in
    group: dist.ProcessGroup | None  # the ranks, of one step; None for all
    n_ranks: int  # the number of ranks whose backwards are in the sum
    parameters: list[nn.Parameter]


def make_buckets(
    parameters: Iterable[nn.Parameter], world: World, gradients: GradientState, dtype: torch.dtype | None
) -> list[Bucket]:
    """Buckets of those `parameters` whose gradients no backward reduces over ranks."""

    def of_ranks(p: nn.Parameter) -> tuple[dist.ProcessGroup | None, int]:
        # All ranks of a step have a copy of a plain parameter; those of the same data have parts of a split layer.
        if (part := gradients.part(p)) is not None:  # whose gradients are sums over the ranks of other parts already
            return part.copies, 1 if part.copies is None else world.data_size
        return (world.data_group, world.data_size) if is_dtensor(p) else (world.step_group, world.step_size)

    def kind(p: nn.Parameter) -> tuple[torch.dtype, dist.ProcessGroup | None, int]:
        return (p.dtype if dtype is None or p.is_complex() else dtype, *of_ranks(p))

    crossing = [p for p in parameters if id(p) not in gradients.sharded and kind(p)[2] > 1 and _can_be_trained(p)]
    return [Bucket(*of, members) for of, members in in_buckets(crossing, kind)]


def in_buckets(tensors: Iterable[T], kind: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    """`tensors` in lists of one kind and of about 25 MiB, in their order, each list with its kind."""
    buckets: list[tuple[K, list[T]]] = []
    filling: dict[K, list[T]] = {}
    filled: dict[K, int] = {}
    for tensor in tensors:
        of = kind(tensor)
        if of not in filling or filled[of] >= BUCKET_BYTES:
            filling[of], filled[of] = [], 0
            buckets.append((of, filling[of]))
        filling[of].append(tensor)
        filled[of] += local_tensor(tensor).nbytes
    return buckets


def _can_be_trained(p: nn.Parameter) -> bool:
    """Not a frozen one of integers or of 8 bits."""
    return p.requires_grad or (p.element_size() > 1 and (p.is_floating_point() or p.is_complex()))


class Averaging:
    """Averages gradients over ranks, one collective per bucket."""

    def __init__(self, buckets: Sequence[Bucket], world: World) -> None:
        self._buckets = buckets
        self._world = world
        # What is kept over steps: on the CPU much new memory costs more than a copy into it.
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}
        self._asleep: list[nn.Parameter] = []  # frozen in the last run, and at each backward since

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def before_backward(self) -> None:
        """A backward is about to run, and may give gradients to parameters that are frozen when they are averaged."""
        if self._asleep:
            self._asleep = [p for p in self._asleep if not p.requires_grad]

    def run(self, weight: Tensor | float | None) -> Tensor | None:
        """Averages the gradients that are there; a collective. Returns the exact sum of all ranks' weights."""
        taking = self._taking()
        slots = None if weight is None else weight_slots(weight, self._world)
        carrier = None if slots is None else self._carrier(taking)
        self._cross(taking, [slots if bucket is carrier else None for bucket, _ in taking])
        self._asleep = [p for bucket in self._buckets for p in bucket.parameters if not p.requires_grad]
        if slots is None:
            return None
        if carrier is None:  # a further collective
            slots = slots.to(self._world.device)
            dist.all_reduce(slots, group=self._world.step_group)
        return slots.double().sum().to(self._world.parameter_device)

    def _cross(self, taking: Sequence[tuple[Bucket, list[nn.Parameter]]], tails: Sequence[Tensor | None]) -> None:
        """Sends each bucket with its tail, and receives the mean."""
        on_the_way: list[Sent] = []
        for number, ((bucket, parameters), tail) in enumerate(zip(taking, tails, strict=True)):
            if number >= _AT_ONCE:
                on_the_way[number - _AT_ONCE].receive()
            on_the_way.append(self._send(bucket, parameters, tail, place=number % _AT_ONCE))
        for sent in on_the_way[-_AT_ONCE:]:
            sent.receive()

    def _taking(self) -> list[tuple[Bucket, list[nn.Parameter]]]:
        """The buckets with those of their parameters that may have gradients on some rank."""
        asleep = {p for p in self._asleep if not p.requires_grad}
        for p in asleep:
            if p.grad is not None:
                raise StepError(
                    f"a frozen parameter of shape {tuple(p.shape)} has a gradient that no backward() of the trainer "
                    "gave it while it was trained, and other ranks may have none. Call self.backward(loss), or set its "
                    "gradient to None."
                )
        all_ = [(b, [p for p in b.parameters if p not in asleep] if asleep else b.parameters) for b in self._buckets]
        return [(bucket, parameters) for bucket, parameters in all_ if parameters]

    def _carrier(self, taking: Sequence[tuple[Bucket, list[nn.Parameter]]]) -> Bucket | None:
        """The bucket that carries the weights: the last, if it goes to all ranks of a step and does not round them."""
        last = taking[-1][0] if taking else None
        if last is None or last.dtype not in (torch.float32, torch.float64) or last.n_ranks < self._world.step_size:
            return None
        return last

    def _send(self, bucket: Bucket, parameters: list[nn.Parameter], tail: Tensor | None, *, place: int) -> Sent:
        size = sum(local.numel() for local in local_tensors(parameters)) + len(parameters)
        size += 0 if tail is None else tail.numel()
        key = place, bucket.dtype
        flat = self._memory.get(key)
        if flat is None or flat.numel() < size:
            self._memory.pop(key, None)
            flat = torch.empty(size, dtype=bucket.dtype, device=self._world.parameter_device)
            if flat.nbytes >= _KEPT_FROM:
                self._memory[key] = flat
        return Sent(bucket, parameters, tail, flat[:size], self._world.device)


class Sent:
    def __init__(
        self, bucket: Bucket, parameters: list[nn.Parameter], weights: Tensor | None, flat: Tensor, device: torch.device
    ) -> None:
        locals_ = local_tensors([p if p.grad is None else p.grad for p in parameters])
        sizes = [local.numel() for local in locals_]
        *parts, self._is_there, self._tail = flat.split([*sizes, len(sizes), 0 if weights is None else weights.numel()])
        self._views = [part.view(local.shape) for part, local in zip(parts, locals_, strict=True)]
        self._lacking = [i for i, p in enumerate(parameters) if p.grad is None]
        self._is_there.fill_(1.0)
        for i in self._lacking:
            self._is_there[i] = 0.0
            locals_[i] = torch.zeros_like(locals_[i])
        if flat.device.type == "cpu":  # one pass over memory instead of two
            n = torch.tensor(float(bucket.n_ranks), dtype=locals_[0].dtype)
            for local, view in zip(locals_, self._views, strict=True):
                torch.div(local, n, out=view)
        else:
            foreach_copy_(self._views, locals_)
            foreach_div_(self._views, float(bucket.n_ranks))
        if weights is not None:
            self._tail.copy_(weights)
        self._parameters, self._locals, self._weights, self._flat = parameters, locals_, weights, flat
        self._on_device = flat.to(device)
        self.work: Any = dist.all_reduce(self._on_device, group=bucket.group, async_op=True)

    def receive(self) -> None:
        """Gives each parameter its mean; one that no rank has a gradient for gets none."""
        self.work.wait()
        if self._on_device is not self._flat:
            self._flat.copy_(self._on_device)
        foreach_copy_(self._locals, self._views)
        if self._lacking:  # a rank that has all gradients does not wait for the device
            there = self._is_there.tolist()
            for i in self._lacking:
                if there[i]:
                    self._parameters[i].grad = with_local(self._parameters[i], self._locals[i])
        if self._weights is not None:
            self._weights.copy_(self._tail)


def weight_slots(weight: Tensor | float, world: World) -> Tensor:
    """`weight` in this rank's place, zeros in others', as three float32 that hold a float64 exactly."""
    slots = torch.zeros(world.world_size, _PARTS, dtype=torch.float32, device=world.parameter_device)
    if isinstance(weight, Tensor):
        rest = weight.detach().to(device=slots.device, dtype=torch.float64)
    else:
        rest = torch.full((), weight, dtype=torch.float64, device=slots.device)  # a copy from the host would wait
    for part in range(_PARTS):
        slots[world.rank, part] = rest
        rest = rest - slots[world.rank, part]
    return slots.view(-1)


_REMEDY = "Or set device_parameters.overlap_reduce=False, which averages in step()."


class OverlappedAveraging(Averaging):
    """Sends buckets while the backward which fills them still runs; every rank builds it at the same place. A bucket
    leaves in the window's last micro-batch, in the parameters' order turned round; the rest leaves in `step`. It is
    final: a later change of it cannot be seen by other ranks and is an error."""

    def __init__(self, buckets: Sequence[Bucket], world: World) -> None:
        group, meet_others = world.further_group(), (None, world.step_group, world.data_group)
        # The ranks that have the same part do nothing else together.
        super().__init__([replace(b, group=group) if b.group in meet_others else b for b in buckets], world)
        self._begin()
        self._hooks: dict[Tensor, RemovableHandle] = {}

    def _begin(self) -> None:
        self._window: list[tuple[Bucket, list[nn.Parameter]]] = []
        self._number: dict[Tensor, int] = {}  # the place in `_window` of each parameter
        self._awaited: list[set[Tensor]] = []
        self._sent: list[Sent] = []
        self._early: list[tuple[nn.Parameter, Tensor, int]] = []  # values sent in a backward, as they were then

    @property
    def is_on_the_way(self) -> bool:
        return bool(self._sent)

    def begin_last_batch(self) -> None:
        """The window's last micro-batch begins: from now on a gradient is complete when a backward has added to it."""
        self._window = super()._taking()
        self._number = {p: number for number, (_, parameters) in enumerate(self._window) for p in parameters}
        self._awaited = [set(parameters) for _, parameters in self._window]
        for p in (p for awaited in self._awaited for p in awaited):
            if p.requires_grad and p not in self._hooks:  # a frozen one takes no hook, until it is trained
                self._hooks[p] = p.register_post_accumulate_grad_hook(self._gradient_is_there)

    def _taking(self) -> list[tuple[Bucket, list[nn.Parameter]]]:
        if not self._window:  # the plan was made in this very step
            self.begin_last_batch()
        # What `begin_last_batch` did not see, since it was unfrozen in the micro-batch, leaves by itself.
        late = [(bucket, [p for p in parameters if p not in self._number]) for bucket, parameters in super()._taking()]
        self._window += [(bucket, parameters) for bucket, parameters in late if parameters]
        return self._window

    def _cross(self, taking: Sequence[tuple[Bucket, list[nn.Parameter]]], tails: Sequence[Tensor | None]) -> None:
        for tail in tails[len(self._sent) :]:
            self._send_next(tail)
        for p, grad, count in self._early:
            if p.grad is not grad or write_count(grad) != count:
                raise StepError(
                    f"a gradient of shape {tuple(p.shape)} was changed between backward and step(), after it had been "
                    f"sent to the other ranks. Change gradients in pre_optimizer_step. {_REMEDY}"
                )
        for sent in self._sent:
            sent.receive()
        self._begin()

    def forget(self) -> None:
        """Drops what is on its way; a collective in a window's last batch."""
        while len(self._sent) < len(self._window):
            self._send_next(None)
        for sent in self._sent:
            sent.work.wait()
        self._begin()

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self.forget()

    def _send_next(self, tail: Tensor | None) -> None:
        number = len(self._sent)
        self._sent.append(self._send(*self._window[number], tail, place=number))

    @torch.no_grad()
    def _gradient_is_there(self, parameter: Tensor) -> None:
        number = self._number.get(parameter)
        if number is None:
            return
        if parameter not in self._awaited[number]:  # whether or not its bucket has left, which depends on sizes
            raise StepError(
                f"a second backward in the window's last micro-batch added to a gradient of shape "
                f"{tuple(parameter.shape)}, which leaves after the first. Add the losses, call backward once. {_REMEDY}"
            )
        self._awaited[number].remove(parameter)
        while len(self._sent) < len(self._window) - 1 and not self._awaited[len(self._sent)]:
            parameters = self._window[len(self._sent)][1]
            self._early += [(p, p.grad, write_count(p.grad)) for p in parameters if p.grad is not None]
            self._send_next(None)


@dataclass(frozen=True)
class ParameterGroup:
    copies: int  # number of ranks of a step that hold each element
    is_sharded: bool  # whether they are DTensors
    divisor: float  # remaining divisor after a backward has averaged gradients over ranks
    is_counted: bool  # a norm over stages takes their squares from this rank
    parameters: list[nn.Parameter]


@dataclass(frozen=True)
class StepPlan:
    """Facts about a set of optimizers that `step` needs, computed once."""

    parameters: list[nn.Parameter]  # all their parameters, each once
    groups: list[ParameterGroup]  # the same, grouped by how many ranks hold each of their elements
    tied: list[tuple[nn.Parameter, tuple[int, ...]]]  # with all ranks that have a copy
    averaging: Averaging  # of the gradients that no backward reduces over ranks; of none at world size 1
    is_whole: bool  # averaged gradients are equal to the bit on all ranks
    sharded: list[nn.Parameter]  # parameters whose gradients a backward reduces, each rank keeping its shard
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
        tied=[(by_id[key], ranks) for key, ranks in gradients.tied.items() if key in by_id],
        is_whole=world.data_copies == 1 and all(copies == world.step_size for copies, *_ in kinds),
        sharded=sharded,
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
    grads = [[grad for p in group.parameters if (grad := p.grad) is not None] for group in plan.groups]
    return [local_tensors(own) if group.is_sharded else own for group, own in zip(plan.groups, grads, strict=True)]


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
