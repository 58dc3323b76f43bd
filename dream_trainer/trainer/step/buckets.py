"""Buckets: the gradients of whole parameters, averaged over ranks in flat tensors of one fixed order.

The collectives follow from the trained parameters, not from what a rank used. A bucket has one number per parameter
for whether the rank has its gradient, and the last one carries the window's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import foreach_copy_, foreach_div_, local_tensor, local_tensors, with_local
from dream_trainer.errors import StepError

if TYPE_CHECKING:
    import torch.distributed as dist

    from dream_trainer.distributed.world import World
    from dream_trainer.gradient_state import GradientState

T = TypeVar("T")
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
    from torch.distributed.tensor import DTensor

    def of_ranks(p: nn.Parameter) -> tuple[dist.ProcessGroup | None, int]:
        # All ranks of a step have a copy of a plain parameter; those of the same data have parts of a split layer.
        if (part := gradients.part(p)) is not None:  # whose gradients are sums over the ranks of other parts already
            return part.copies, 1 if part.copies is None else world.data_size
        return (world.data_group, world.data_size) if isinstance(p, DTensor) else (world.step_group, world.step_size)

    def kind(p: nn.Parameter) -> tuple[torch.dtype, dist.ProcessGroup | None, int]:
        return (p.dtype if dtype is None or p.is_complex() else dtype, *of_ranks(p))

    crossing = [p for p in parameters if id(p) not in gradients.shared and kind(p)[2] > 1 and _can_be_trained(p)]
    return [Bucket(*of, members) for of, members in in_buckets(crossing, kind, _bytes)]


def in_buckets(items: Iterable[T], kind: Callable[[T], K], n_bytes: Callable[[T], int]) -> list[tuple[K, list[T]]]:
    """`items` in lists of one kind and of about 25 MiB, in their order, each list with its kind."""
    buckets: list[tuple[K, list[T]]] = []
    filling: dict[K, list[T]] = {}
    filled: dict[K, int] = {}
    for item in items:
        of = kind(item)
        if of not in filling or filled[of] >= BUCKET_BYTES:
            filling[of], filled[of] = [], 0
            buckets.append((of, filling[of]))
        filling[of].append(item)
        filled[of] += n_bytes(item)
    return buckets


def _can_be_trained(p: nn.Parameter) -> bool:
    """Not a frozen one of integers or of 8 bits."""
    return p.requires_grad or (p.element_size() > 1 and (p.is_floating_point() or p.is_complex()))


def _bytes(p: nn.Parameter) -> int:
    return local_tensor(p).numel() * p.element_size()


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
        self._let_sleep()
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

    def _let_sleep(self) -> None:
        """Frozen parameters are not sent again before they are trained."""
        self._asleep = [p for bucket in self._buckets for p in bucket.parameters if not p.requires_grad]

    def _carrier(self, taking: Sequence[tuple[Bucket, list[nn.Parameter]]]) -> Bucket | None:
        """The bucket that carries the weights: the last, if it goes to all ranks of a step and does not round them."""
        last = taking[-1][0] if taking else None
        if last is None or last.dtype not in (torch.float32, torch.float64) or last.n_ranks < self._world.step_size:
            return None
        return last

    def _send(self, bucket: Bucket, parameters: list[nn.Parameter], tail: Tensor | None, *, place: int) -> Sent:
        size = sum(local.numel() for local in local_tensors(parameters)) + len(parameters)
        flat = self._flat((place, bucket.dtype), size + (0 if tail is None else tail.numel()))
        return Sent(bucket, parameters, tail, flat, self._world.device)

    def _flat(self, key: tuple[int, torch.dtype], size: int) -> Tensor:
        flat = self._memory.get(key)
        if flat is None or flat.numel() < size:
            self._memory.pop(key, None)
            flat = torch.empty(size, dtype=key[1], device=self._world.parameter_device)
            if flat.nbytes >= _KEPT_FROM:
                self._memory[key] = flat
        return flat[:size]

    def _total(self, slots: Tensor, *, is_carried: bool) -> Tensor:
        """The sum of all ranks' weights; a collective if no bucket carried them."""
        if not is_carried:
            import torch.distributed as dist

            slots = slots.to(self._world.device)
            dist.all_reduce(slots, group=self._world.step_group)
        return slots.double().sum().to(self._world.parameter_device)


class Sent:
    def __init__(
        self,
        bucket: Bucket,
        parameters: list[nn.Parameter],
        weights: Tensor | None,
        flat: Tensor,
        device: torch.device,
    ) -> None:
        import torch.distributed as dist

        locals_ = local_tensors([p if p.grad is None else p.grad for p in parameters])
        sizes = [local.numel() for local in locals_]
        *parts, self._is_there, self._tail = flat.split([*sizes, len(sizes), 0 if weights is None else weights.numel()])
        self._views = [part.view(local.shape) for part, local in zip(parts, locals_, strict=True)]
        self._lacking = [i for i, p in enumerate(parameters) if p.grad is None]
        self._is_there.fill_(1.0)
        for i in self._lacking:
            self._is_there[i] = 0.0
            locals_[i] = torch.zeros_like(locals_[i])
        _divide(locals_, self._views, bucket.n_ranks)
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


def _divide(grads: list[Tensor], views: list[Tensor], n_ranks: int) -> None:
    if views[0].device.type == "cpu":  # one pass over memory instead of two
        n = torch.tensor(float(n_ranks), dtype=grads[0].dtype)
        for grad, view in zip(grads, views, strict=True):
            torch.div(grad, n, out=view)
        return
    foreach_copy_(views, grads)
    foreach_div_(views, float(n_ranks))


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
