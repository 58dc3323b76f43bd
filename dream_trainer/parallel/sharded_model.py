"""A model whose parameters are shards between steps, and whole, plain tensors inside them. In a step user code may do
all that it may on one process. It costs the memory of two whole models and one's gradients, so
`FSDPParameters.min_group_mib` limits it to small models."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dream_trainer.compat.pytorch import (
    OfTensors,
    all_gather_flat,
    foreach_copy_,
    is_dtensor,
    local_tensor,
    share_hooks,
    with_local,
    write_count,
)
from dream_trainer.errors import StepError
from dream_trainer.gradient_state import OwnTime

_stepped_as_shard: MutableMapping[Tensor, bool] = OfTensors()  # whole parameters
_ALIGNMENT = 16  # bytes; any dtype can be viewed at such an offset


@dataclass(frozen=True)
class _Parameter:
    shard: nn.Parameter
    whole: nn.Parameter
    values: Tensor
    slots: list[tuple[nn.Module, str]]
    start: int
    rows: int

    def own_rows(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(0, self.start, self.rows)


class ShardedModel:
    def __init__(self, model: nn.Module, mesh: DeviceMesh, check: Callable[[], object], own_time: OwnTime) -> None:
        self._model = model
        self._check, self._own_time = check, own_time
        self._mesh = mesh
        self._rank, self._n_ranks = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self._strides: dict[tuple[nn.Module, str], tuple[int, ...]] = {}
        self._parameters: list[_Parameter] = []
        self.whole_of: dict[int, nn.Parameter] = {}
        self.shard_of: dict[int, nn.Parameter] = {}
        self._marks: list[tuple[int, int]] = []
        self._trained: list[bool] = []
        self.is_whole = False
        cut: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter.ndim == 0 or type(parameter) is not nn.Parameter:
                    continue
                if parameter not in cut:
                    cut[parameter] = self._shard(parameter)
                self._strides[module, name] = parameter.stride()
                _set(module, name, cut[parameter])
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward, always_call=True)
        self._is_whole_for_forward = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _InStep:
        """A copy of the model made inside a step has whole parameters, and needs no gathering."""
        if not self.is_whole:
            raise TypeError(
                "a sharded model was copied between steps, when it has this rank's shards. Copy it in a step, in an "
                "event of your trainer, or inside trainer.gathered(model)."
            )
        return _InStep()

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        start, rows = rows_of(self._rank, parameter.shape[0], self._n_ranks)
        local = parameter.detach().narrow(0, start, rows).clone(memory_format=torch.contiguous_format)
        placements = [*[Replicate()] * (self._mesh.ndim - 1), Shard(0)]
        contiguous = torch.empty(parameter.shape, device="meta").stride()
        shard = DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=parameter.shape, stride=contiguous
        )
        sharded = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        share_hooks(sharded, parameter)
        return sharded

    def connect(self) -> None:
        """The shards are real: makes room for the whole parameters."""
        slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module, name in self._strides:
            slots.setdefault(module.get_parameter(name), []).append((module, name))
        self._parameters = [self._make_whole(shard, at) for shard, at in slots.items()]
        for parameter in self._parameters:
            self.whole_of[id(parameter.shard)] = parameter.whole
            self.shard_of[id(parameter.whole)] = parameter.shard
        self._lay_out()

    def _make_whole(self, shard: nn.Parameter, slots: list[tuple[nn.Module, str]]) -> _Parameter:
        device = local_tensor(shard).device
        whole = nn.Parameter(
            torch.empty_strided(shard.shape, self._strides[slots[0]], dtype=shard.dtype, device=device),
            requires_grad=shard.requires_grad,
        )
        vars(whole).update(vars(shard))
        _stepped_as_shard[whole] = True
        start, rows = rows_of(self._rank, shard.shape[0], self._n_ranks)
        return _Parameter(shard, whole, whole.data, slots, start, rows)

    def _lay_out(self) -> None:
        """Places of all shards in one flat tensor of bytes, which a single collective gathers from all ranks."""
        shards = [p.shard for p in self._parameters]
        most = [rows_of(0, shard.shape[0], self._n_ranks)[1] for shard in shards]  # of the largest part
        n_bytes = [n * math.prod(p.shape[1:]) * p.dtype.itemsize for n, p in zip(most, shards, strict=True)]
        sizes = [math.ceil(n / _ALIGNMENT) for n in n_bytes]
        total = _ALIGNMENT * sum(sizes)
        device = self._parameters[0].values.device if self._parameters else torch.device("cpu")
        self._sent = torch.zeros(total, dtype=torch.uint8, device=device)
        self._received = torch.zeros(total * self._n_ranks, dtype=torch.uint8, device=device)
        self._own_parts = [p for p in self._parameters if p.rows]
        self._sending: list[Tensor] = []
        self._receiving: list[Tensor] = []
        self._places: list[Tensor] = []
        self._quiet_places: list[Tensor] = []
        offset = 0
        for parameter, size in zip(self._parameters, sizes, strict=True):
            if parameter.rows:
                self._sending.append(_part(self._sent, offset, parameter.rows, parameter.values))
            for rank in range(self._n_ranks):
                start, rows = rows_of(rank, parameter.values.shape[0], self._n_ranks)
                if rows:
                    self._receiving.append(_part(self._received, rank * total + offset, rows, parameter.values))
                    self._places.append(parameter.whole.detach().narrow(0, start, rows))
                    self._quiet_places.append(parameter.values.narrow(0, start, rows))
            offset += _ALIGNMENT * size

    # -- called by the trainer

    def gather(self, *, after_step: bool) -> None:
        """Fills the whole parameters from the shards of all ranks; a collective."""
        if not self._parameters:
            return
        self._check()
        with self._own_time, torch.no_grad():
            if self._sending:
                foreach_copy_(self._sending, [local_tensor(p.shard) for p in self._own_parts])
            all_gather_flat(self._received, self._sent, self._mesh.get_group(self._mesh.ndim - 1))
            foreach_copy_(self._places if after_step else self._quiet_places, self._receiving)

    def enter(self) -> None:
        """Gives the modules the whole parameters, which are gathered."""
        self._trained = [parameter.shard.requires_grad for parameter in self._parameters]
        for parameter in self._parameters:
            shard, whole = parameter.shard, parameter.whole
            if shard.requires_grad is not whole.requires_grad:
                whole.requires_grad_(shard.requires_grad)
            share_hooks(whole, shard)
            _exchange(parameter.slots, shard, whole)
        self._marks = self._writes()
        self.is_whole = True

    def leave(self) -> bool:
        """Gives the modules the shards, including writes to the whole parameters."""
        is_fresh = self.write_back()
        for parameter, was_trained in zip(self._parameters, self._trained, strict=True):
            shard, whole = parameter.shard, parameter.whole
            if shard.requires_grad is was_trained:  # else user code that kept the shard has set it
                shard.requires_grad_(whole.requires_grad)
            _exchange(parameter.slots, whole, shard)
        self.is_whole = False
        return is_fresh

    @torch.no_grad()
    def write_back(self) -> bool:
        """Copies writes to the whole parameters to the shards; see `leave`."""
        written = [before != now for before, now in zip(self._marks, self._writes(), strict=True)]
        for parameter in self._parameters:
            whole, values = parameter.whole, parameter.values
            if whole.data_ptr() != values.data_ptr() or whole.stride() != values.stride():
                values.copy_(whole.detach())
                whole.data = values
        kept = [p for p, is_written in zip(self._parameters, written, strict=True) if p.rows and not is_written]
        if kept:
            foreach_copy_([local_tensor(p.shard) for p in kept], [p.own_rows(p.values) for p in kept])
        marks = zip(self._marks, self._writes(), written, strict=True)
        self._marks = [mark if is_written else new for mark, new, is_written in marks]
        return not any(written)

    def part_of(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor that is laid out as a whole parameter, as a DTensor."""
        of = next(one for one in self._parameters if one.whole is parameter)
        return with_local(of.shard, of.own_rows(tensor.detach()).clone(memory_format=torch.contiguous_format))

    def end_step(self) -> None:
        """Raises StepError if a whole parameter was written to since `begin_step`: the shards count."""
        for parameter, before in zip(self._parameters, self._whole_writes, strict=True):
            parameter.shard.grad = None
            if write_count(parameter.whole) != before:
                name = next(n for n, p in self._model.named_parameters() if p is parameter.shard)
                raise StepError(
                    f"step() of an optimizer wrote to {name} as it is in training_step, not to its shard. Take "
                    "parameters from param_groups, or from lists, dicts or tuples in the optimizer's attributes."
                )

    def begin_step(self) -> None:
        """Gives the shards their part of the gradients."""
        self._whole_writes = [write_count(parameter.whole) for parameter in self._parameters]
        for parameter in self._parameters:
            gradient = parameter.whole.grad
            if gradient is not None:
                parameter.shard.grad = with_local(parameter.shard, parameter.own_rows(gradient).contiguous())

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.shard.grad = parameter.whole.grad = None

    def _writes(self) -> list[tuple[int, int]]:
        return [(write_count(p.shard), write_count(local_tensor(p.shard))) for p in self._parameters]

    # -- calls of the model between steps, as for sampling in a callback

    def _before_forward(self, *_: Any) -> None:
        if not self.is_whole:
            self.gather(after_step=False)
            self.enter()
            self._is_whole_for_forward = True

    def _after_forward(self, *_: Any) -> None:
        if self._is_whole_for_forward:
            self._is_whole_for_forward = False
            self.leave()


class _InStep:
    """The object that the hooks of a copied model are bound to."""

    is_whole = True
    _is_whole_for_forward = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _InStep:
        return self


def is_sharded(parameter: Tensor) -> bool:
    """Whether an optimizer steps shards of this parameter, which may be whole at the moment."""
    return is_dtensor(parameter) or bool(_stepped_as_shard.get(parameter))


def rows_of(rank: int, n_rows: int, n_ranks: int) -> tuple[int, int]:
    """First row and number of rows of a rank's part, cut as `torch.chunk` cuts."""
    most = math.ceil(n_rows / n_ranks)
    start = min(rank * most, n_rows)
    return start, min(most, n_rows - start)


def _part(flat: Tensor, offset: int, rows: int, like: Tensor) -> Tensor:
    shape = (rows, *like.shape[1:])
    return flat.narrow(0, offset, math.prod(shape) * like.dtype.itemsize).view(like.dtype).view(shape)


def _exchange(slots: Sequence[tuple[nn.Module, str]], former: nn.Parameter, new: nn.Parameter) -> None:
    for module, name in slots:
        if module._parameters.get(name) is former:  # else user code put something else there
            _set(module, name, new)


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    # Recurrent modules list their weights a second time, which their own `__setattr__` follows.
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)
