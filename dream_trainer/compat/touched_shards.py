"""Parameters of `fully_shard` that code reads outside of the forward that gathers them: touched, gathered, and held.

While they can be touched, sharded parameters have the class `TouchableShard`. An operation on one gathers its group,
which stays gathered to the end of the step, and goes on with the whole parameter, as in one process. Operations among
shards (`shard.lerp_(other_shard, 0.1)`), writes and metadata are the shard's own.

This file uses private names of PyTorch, as pytorch.py does; `tests/trainer/test_touched_shards.py` exercises them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter, tree_map

_COMPUTED = frozenset(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_FACTORIES = frozenset((Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor, Tensor.new_zeros))
_OWN = frozenset(
    getattr(Tensor, name)
    for name in (
        *("__deepcopy__", "__format__", "__hash__", "__len__", "__reduce_ex__", "__repr__", "data_ptr"),
        *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "is_same_size"),
        *("is_shared", "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook"),
        *("requires_grad_", "retain_grad", "size", "storage_offset", "stride", "type", "untyped_storage"),
    )
) | {torch.is_complex, torch.is_floating_point, torch.is_same_size, torch.numel}


class AssignableShard(DTensor):
    """A sharded parameter whose `data` can be assigned to, which does nothing to a DTensor."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:
            shard, values = args
            with torch.no_grad():
                if not isinstance(values, DTensor):
                    values = distribute_tensor(values, shard.device_mesh, shard.placements, src_data_rank=None)
                return _as_shards(Tensor.copy_, (shard, values), {})
        return _as_shards(func, args, kwargs or {})


class TouchableShard(DTensor):
    """A sharded parameter that is whole for whatever computes with it."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _FACTORIES and isinstance(args[0], DTensor):
            return func(args[0]._local_tensor, *args[1:], **kwargs)
        if func == _SET_DATA:
            with torch.no_grad():
                return _write(Tensor.copy_, args, {})
        if func is Tensor.detach or func == _GET_DATA:
            return _alias(func, args[0])
        if func in _OWN or (name in ("__get__", "__set__", "__delete__") and func not in _COMPUTED):
            return _as_shards(func, args, kwargs)
        if type(args[0]) is cls and _changes_its_first(name):
            return _write(func, args, kwargs)
        if any(_is_other_shard(value) for value in tree_iter((args, kwargs))):
            return _as_shards(func, args, kwargs)
        return _on_whole(func, args, kwargs)

    def full_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """The whole parameter, with its gradient."""
        whole = _whole(self)
        return super().full_tensor(*args, **kwargs) if whole is self else whole


@contextmanager
def assignable(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside, `parameter.data = values` writes to the parameters of `optimizers` that are shards; in a step of users'
    own, since it costs about a microsecond for each operation on shards."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    shards: list[Any] = [p for p in parameters if type(p) is DTensor]
    for shard in shards:
        shard.__class__ = AssignableShard
    try:
        yield
    finally:
        for shard in shards:
            shard.__class__ = DTensor


class TouchableParameter(FSDPParam):
    """What `fully_shard` knows of one parameter. A gathering leaves alone what `functional_call` put in its place."""

    def _setattr_on_modules(self, param: nn.Parameter) -> None:
        now = self._module_info.module._parameters.get(self._module_info.param_name)
        if now is self.sharded_param or now is vars(self).get("_unsharded_param"):
            super()._setattr_on_modules(param)

    def reset_sharded_param(self) -> None:
        """After weights were loaded: those that were gathered are written back later."""
        if self.sharded_state != ShardedState.UNSHARDED:
            super().reset_sharded_param()  # type: ignore[no-untyped-call]


class TouchableShards:
    """The sharded parameters of a trainer's models.

    Args:
        check: Called before each gathering; raises where ranks may not communicate.
    """

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self._shards: list[DTensor] = []
        self._touched: dict[Any, None] = {}
        self.may_be_touched = False

    def add(self, group: Any) -> None:
        """From now on the parameters of a `SharedGroup` can be touched, while `let_touch` says so."""
        for parameter in group.fsdp_params:
            parameter.__class__ = TouchableParameter
            vars(parameter.sharded_param)[_PLACE] = self, group, parameter
            self._shards.append(parameter.sharded_param)

    def let_touch(self, allowed: bool) -> None:
        """Whether parameters can be touched from now on. If not, what was touched is let go."""
        self.may_be_touched = allowed
        for shard in self._shards:
            shard.__class__ = TouchableShard if allowed else DTensor
        if not allowed:
            self.let_go()

    def let_go(self) -> None:
        """Gives back what was gathered for being touched. Its gradients wait for the step."""
        for group in self._touched:
            group.let_touched_go()
        self._touched.clear()

    def gather(self, group: Any) -> None:
        """A parameter of `group` is touched; a collective."""
        if not group.is_held:
            self._check()
            self._touched[group] = None
        group.hold_touched()


_PLACE = "_place_in_group"


def _changes_its_first(name: str) -> bool:
    """Whether a function of PyTorch changes its first argument: such ones end in an underscore."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _whole(value: Any) -> Any:
    if type(value) is not TouchableShard:
        return value
    shard: Any = value
    shards, group, parameter = vars(shard)[_PLACE]
    if not shards.may_be_touched:  # what was taken from a parameter in a step, and kept
        shard.__class__ = DTensor
        return shard
    shards.gather(group)
    whole = parameter._unsharded_param
    return whole if shard.requires_grad or not whole.requires_grad else whole.detach()


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` gives for whole parameters, which graphs gather again if they are given back before backward."""
    groups = [vars(value)[_PLACE][1] for value in tree_iter((args, kwargs)) if type(value) is TouchableShard]
    args, kwargs = tree_map(_whole, (args, kwargs))
    saved = groups[0].saved_weights
    if not saved.begin():
        return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    finally:
        saved.end()


def _alias(func: Any, shard: Any) -> Any:
    """What `detach()` and `data` give: written to it is a shard, and read the whole parameter."""
    result = _as_shards(func, (shard,), {})
    result.__class__ = TouchableShard
    vars(result)[_PLACE] = vars(shard)[_PLACE]
    return result


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """Writes to a shard, the first of `args`: to the whole parameter if that is held or plain tensors are written."""
    shard = args[0]
    shards, group, _ = vars(shard)[_PLACE]
    values = list(tree_iter((args, kwargs)))
    is_plain = any(isinstance(v, Tensor) and not isinstance(v, DTensor) and v.ndim for v in values)
    if shards.may_be_touched and (is_plain or group.is_held) and not any(map(_is_other_shard, values)):
        _on_whole(func, args, kwargs)
        return shard
    if not group.is_held:
        return _as_shards(func, args, kwargs)
    group.write_back(also_unseen=True)
    result = _as_shards(func, args, kwargs)
    group.gather_anew()
    return result


def _as_shards(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _is_other_shard(value: Any) -> bool:
    return type(value) is DTensor and any(dim.is_shard() for dim in value.placements)
