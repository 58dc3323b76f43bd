"""A rank without the others, and the tensors without values of a model on it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from dream_trainer.compat.fully_shard import take_note
from dream_trainer.compat.lone_rank import FakeTensor, make_group_alone
from dream_trainer.compat.pytorch import keep_hooks
from dream_trainer.distributed.world import World
from dream_trainer.errors import DreamTrainerError
from dream_trainer.meta.realize import MetaPlace, Replay, put
from dream_trainer.meta.tape import Tape
from dream_trainer.parallel.sharding import fsdp_modules


class PlanError(DreamTrainerError):
    """A program cannot be planned, or has an error that a run would have too."""


class NeedsFirstStageError(PlanError):
    """What the stage before gives is not known yet."""


class PlannedWorld(World):
    """A rank whose collectives return at once: all the others say what this one says.

    Attributes:
        sent_numbers: What this rank's stage of a pipeline told the next one of the tensors that it sends.
        known_numbers: What the first stage tells the next one, and so all are taken to tell.
    """

    sent_numbers: list[int] | None = None
    known_numbers: list[int] | None = None

    @override
    def _make_default_group(self, timeout: timedelta) -> None:
        make_group_alone(self.rank, self.world_size)

    @override
    def _make_cpu_group(self, timeout: timedelta) -> dist.ProcessGroup:
        return cast("dist.ProcessGroup", dist.new_group())

    @override
    def _set_time_outs(self, seconds: float) -> None: ...

    @override
    def send_numbers(self, numbers: list[int], to: int, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
        self.sent_numbers = numbers
        return super().send_numbers(numbers, to, group)

    @override
    def receive_numbers(self, count: int, source: int, group: dist.ProcessGroup) -> list[int]:
        known = self.known_numbers or self.sent_numbers
        if known is None:
            raise NeedsFirstStageError("a stage of a pipeline is planned after the first one.")
        return known

    @override
    def barrier(self) -> None: ...

    @override
    def all_gather_object(self, value: Any, /) -> list[Any]:
        return [value] * self.world_size

    @override
    def gather_object(self, value: Any, /) -> list[Any] | None:
        return [value] * self.world_size if self.is_main else None

    @override
    def scatter_object(self, values: Sequence[Any] | None, /) -> Any:
        return None if values is None else values[self.rank]

    @override
    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value

    @override
    def broadcast(self, values: Tensor, src: int = 0) -> Tensor:
        return values

    @override
    def all_reduce(self, values: Tensor, op: str = "sum") -> Tensor:
        return values.mul_(self.world_size) if op == "sum" else values

    @override
    def all_gather(self, values: Tensor) -> Tensor:
        return values.repeat(self.world_size, *[1] * values.ndim)


class Valueless(Replay):
    """Makes the tensors of models without values, in the places of those on meta and of real ones.

    Args:
        mode: In which their operations run.
    """

    def __init__(self, mode: AbstractContextManager[Any]) -> None:
        self.mode: Any = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # by the number of what it replaces

    @override
    def fill(self, group: list[MetaPlace], tape: Tape, device: torch.device) -> None:
        """Gives the places of one storage tensors over one storage."""
        n_bytes = tape.history.storages[group[0].note.ref.storage].meta.nbytes()
        storage = torch.UntypedStorage(n_bytes, device="meta")
        for place in group:
            if place.part is not None:
                put(place, place.part)
            else:
                self._put(place, FakeTensor(self.mode, place.note.ref.view(storage), device))

    def _put(self, place: MetaPlace, real: Tensor) -> None:
        old, place.tensor = place.tensor, real
        if isinstance(old, nn.Parameter):
            real._is_param = True
        real.requires_grad_(old.requires_grad and old.is_leaf)
        vars(real).update({name: value for name, value in vars(old).items() if name not in vars(real)})
        try:
            torch.utils.swap_tensors(old, real)
            keep_hooks(old)
        except RuntimeError:
            for module, name in place.slots:
                setattr(module, name, real)

    @override
    def settle(self, model: nn.Module, device: torch.device) -> None:
        """Also replaces plain parameters and buffers that have values, as those of a model built elsewhere."""
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if type(tensor) in (Tensor, nn.Parameter):
                        slots[name] = self._like(tensor)
        for wrapped in fsdp_modules(model):
            take_note(wrapped)

    def _like(self, tensor: Tensor | None) -> Any:
        assert tensor is not None
        if id(tensor) not in self._made:
            like = self.mode.from_tensor(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            self._made[id(tensor)] = tensor, nn.Parameter(like, tensor.requires_grad) if is_parameter else like
        return self._made[id(tensor)][1]
