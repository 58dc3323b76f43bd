"""Buckets: the gradients of whole parameters, averaged over ranks in flat tensors of one fixed order.

The collectives follow from the trained parameters, not from what a rank used. A bucket has one number per parameter
for whether the rank has its gradient, and the last one carries the window's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dream_trainer.compat.pytorch import (
    foreach_copy_,
    foreach_div_,
    is_dtensor,
    local_tensor,
    local_tensors,
    with_local,
    write_count,
)
from dream_trainer.distributed.world import World
from dream_trainer.errors import StepError
from dream_trainer.gradient_state import GradientState

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
        on_the_way: list[Sent] = []
        for number, (bucket, parameters) in enumerate(taking):
            if number >= _AT_ONCE:
                on_the_way[number - _AT_ONCE].receive()
            tail = slots if bucket is carrier else None
            on_the_way.append(self._send(bucket, parameters, tail, place=number % _AT_ONCE))
        for sent in on_the_way[-_AT_ONCE:]:
            sent.receive()
        self._asleep = self._frozen()
        return None if slots is None else self._total(slots, is_carried=carrier is not None)

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

    def _frozen(self) -> list[nn.Parameter]:
        return [p for bucket in self._buckets for p in bucket.parameters if not p.requires_grad]

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

    def _total(self, slots: Tensor, *, is_carried: bool) -> Tensor:
        """The sum of all ranks' weights; a collective if no bucket carried them."""
        if not is_carried:
            slots = slots.to(self._world.device)
            dist.all_reduce(slots, group=self._world.step_group)
        return slots.double().sum().to(self._world.parameter_device)


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
        self._work = dist.all_reduce(self._on_device, group=bucket.group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None  # it is asynchronous
        self._work.wait()

    def receive(self) -> None:
        """Gives each parameter its mean; one that no rank has a gradient for gets none."""
        self.wait()
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


# -- Overlap: buckets that cross ranks while the backward which fills them still runs.
#
# A bucket leaves in the window's last micro-batch, in the parameters' order turned round; the rest leaves in `step`.
# It is final: a later change of it cannot be seen by other ranks and is an error.


_REMEDY = "Or set device_parameters.overlap_reduce=False, which averages in step()."


class OverlappedAveraging(Averaging):
    """Averages gradients over ranks from within the backward; every rank builds it at the same place."""

    def __init__(self, buckets: Sequence[Bucket], world: World) -> None:
        group, meet_others = world.further_group(), (None, world.step_group, world.data_group)
        # The ranks that have the same part do nothing else together.
        super().__init__([replace(b, group=group) if b.group in meet_others else b for b in buckets], world)
        self._window: list[tuple[Bucket, list[nn.Parameter]]]
        self._number: dict[Tensor, int]  # the place in `_window` of each parameter
        self._awaited: list[set[Tensor]]
        self._sent: list[Sent]
        self._early: list[tuple[nn.Parameter, Tensor, int]]  # values sent in a backward, as they were then
        self._begin()
        self._hooks: dict[Tensor, RemovableHandle] = {}

    @property
    def is_on_the_way(self) -> bool:
        return bool(self._sent)

    def begin_last_batch(self) -> None:
        """The window's last micro-batch begins: from now on a gradient is complete when a backward has added to it."""
        self._window = self._taking()
        self._number = {p: number for number, (_, parameters) in enumerate(self._window) for p in parameters}
        self._awaited = [set(parameters) for _, parameters in self._window]
        for p in (p for awaited in self._awaited for p in awaited):
            if p.requires_grad and p not in self._hooks:  # a frozen one takes no hook, until it is trained
                self._hooks[p] = p.register_post_accumulate_grad_hook(self._gradient_is_there)

    def run(self, weight: Tensor | float | None) -> Tensor | None:
        if not self._window:  # the plan was made in this very step
            self.begin_last_batch()
        # What `begin_last_batch` did not see, since it was unfrozen in the micro-batch, leaves by itself.
        late = [(bucket, [p for p in parameters if p not in self._number]) for bucket, parameters in self._taking()]
        self._window += [(bucket, parameters) for bucket, parameters in late if parameters]
        slots = None if weight is None else weight_slots(weight, self._world)
        carrier = None if slots is None else self._carrier(self._window)
        while len(self._sent) < len(self._window):
            self._send_next(slots if self._window[len(self._sent)][0] is carrier else None)
        for p, grad, count in self._early:
            if p.grad is not grad or write_count(grad) != count:
                raise StepError(
                    f"a gradient of shape {tuple(p.shape)} was changed between backward and step(), after it had been "
                    f"sent to the other ranks. Change gradients in pre_optimizer_step. {_REMEDY}"
                )
        for sent in self._sent:
            sent.receive()
        self._begin()
        self._asleep = self._frozen()
        return None if slots is None else self._total(slots, is_carried=carrier is not None)

    def forget(self) -> None:
        """Drops what is on its way; a collective in a window's last batch."""
        while len(self._sent) < len(self._window):
            self._send_next(None)
        for sent in self._sent:
            sent.wait()
        self._begin()

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self.forget()

    def _begin(self) -> None:
        self._window, self._number, self._awaited, self._sent, self._early = [], {}, [], [], []

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
