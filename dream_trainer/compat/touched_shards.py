"""Sharded parameters that code reads outside their block's forward: such a read gathers the block. An operation on a
`TouchableShard` computes with the whole parameter, which stays gathered until the step ends. It uses the shard if its
other operands are shards or if it asks for metadata. Operations on a `ShardValue`, such as a gradient, use the shards,
and numbers read from them (`item()`) are those of the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from inspect import getattr_static
from types import GetSetDescriptorType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter, tree_map

from dream_trainer.compat.pytorch import OfTensors, changes_its_first, plain_beside_dtensors

_PROPERTIES: dict[str, Any] = {
    name: found for name in dir(Tensor) if isinstance(found := getattr_static(Tensor, name), GetSetDescriptorType)
}
_GET_DATA, _SET_DATA = _PROPERTIES["data"].__get__, _PROPERTIES["data"].__set__
_GET_GRAD, _SET_GRAD = _PROPERTIES["grad"].__get__, _PROPERTIES["grad"].__set__
_SET_REQUIRES_GRAD = _PROPERTIES["requires_grad"].__set__
_METADATA = {
    *(found.__get__ for name, found in _PROPERTIES.items() if name not in ("T", "mT", "H", "mH", "real", "imag")),
    *(found.__set__ for found in _PROPERTIES.values()),
    *(found.__delete__ for found in _PROPERTIES.values()),
    *(torch.is_complex, torch.is_floating_point, torch.is_same_size, torch.numel),
    *(
        getattr(Tensor, name)
        for name in (
            *("__hash__", "__len__", "__reduce_ex__", "data_ptr", "dim", "element_size", "is_complex"),
            *("is_contiguous", "is_floating_point", "is_inference", "is_same_size", "is_shared", "ndimension"),
            *("nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "size"),
            *("storage_offset", "stride", "type", "untyped_storage"),
        )
    ),
}
_METADATA -= {_GET_DATA, _SET_DATA, _GET_GRAD, _SET_GRAD, _SET_REQUIRES_GRAD}
_FACTORIES = {Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor, Tensor.new_zeros}
_READS = {
    getattr(Tensor, name)
    for name in ("__array__", "__bool__", "__float__", "__format__", "__int__", "__repr__", "item", "numpy", "tolist")
}
_RANDOM = {
    getattr(Tensor, f"{name}_")
    for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
}  # each rank draws all numbers, as one process does
_SHARES_MEMORY = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.share_memory_}
_places: MutableMapping[Tensor, tuple[TouchableShards, Any, Any]] = OfTensors()
"""For each touchable shard, of `add` or `detach()`: the TouchableShards, PyTorch's group and FSDPParam."""


class ShardValue(DTensor):
    """A shard whose operations use shards; plain operands are cut, and `item()` is the whole tensor's number."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _as_shards(func, args, kwargs) if func in _METADATA else _of_shards(func, args, kwargs or {})


class TouchableShard(DTensor):
    """A sharded parameter whose operations gather it and use the whole parameter."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA or (func == _SET_GRAD and (args[1] is None or isinstance(args[1], DTensor))):
            return _as_shards(func, args, kwargs)
        if func == _GET_GRAD:
            return _as_value(_as_shards(func, args, kwargs))
        kwargs = kwargs or {}
        first = args[0] if args else next(iter(kwargs.values()))  # torch.nn.init passes its tensor as a keyword
        if type(first) is cls:
            if func is Tensor.detach or func == _GET_DATA:
                alias = _as_shards(func, (first,), {})  # written to it is a shard, and read the whole parameter
                alias.__class__, _places[alias] = cls, _places[first]
                return alias
            if func is Tensor.requires_grad_ or func == _SET_REQUIRES_GRAD:
                return _set_requires_grad(func, args, kwargs)
            if func == _SET_GRAD:
                return _of_shards(func, args, kwargs)
            if func == _SET_DATA:
                with torch.no_grad():
                    return _write(Tensor.copy_, first, args, kwargs)
            if func is Tensor.__deepcopy__:
                return args[1].setdefault(id(first), _copied(first))
            if func in _FACTORIES:
                return func(first._local_tensor, *args[1:], **kwargs)
            if changes_its_first(func):
                return _write(func, first, args, kwargs)
        if any(_is_other_shard(value) for value in tree_iter((args, kwargs))):
            return _of_shards(func, args, kwargs)
        if func in _SHARES_MEMORY:  # its memory is freed at the end of the step
            args = tree_map(_copied, args)
        return _on_whole(func, args, kwargs)

    def full_tensor(self, *args: Any, **kwargs: Any) -> Any:
        whole = _whole(self)
        if whole is self:
            return super().full_tensor(*args, **kwargs)
        return whole.full_tensor(*args, **kwargs) if isinstance(whole, DTensor) else whole  # split layers


@contextmanager
def as_values(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside, shards among the optimizers' parameters are `ShardValue`s, at some microseconds for each operation."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    shards: list[Any] = [p for p in parameters if type(p) is DTensor]
    for shard in shards:
        shard.__class__ = ShardValue
    try:
        yield
    finally:
        for shard in shards:
            shard.__class__ = DTensor
        _make_plain(shard.grad for shard in shards)


class TouchableParameter(FSDPParam):
    """`fully_shard`'s record of one parameter. Gathering does not replace what `functional_call` put in its place."""

    def _setattr_on_modules(self, param: nn.Parameter) -> None:
        now = self._module_info.module._parameters.get(self._module_info.param_name)
        if now is self.sharded_param or now is vars(self).get("_unsharded_param"):
            super()._setattr_on_modules(param)

    def reset_sharded_param(self) -> None:
        """After weights were loaded: those that were gathered are written back later."""
        if self.sharded_state != ShardedState.UNSHARDED:
            super().reset_sharded_param()  # type: ignore[no-untyped-call]


class TouchableShards:
    """The sharded parameters of a trainer's models."""

    def __init__(self, meet: Callable[[Sequence[int], str], object], *, in_stages: bool = False) -> None:
        self._meet = meet
        self.in_stages = in_stages
        self._shards: list[DTensor] = []
        self._touched: dict[Any, None] = {}
        self.may_be_touched = False

    def add(self, group: Any) -> None:
        """From now on the parameters of a group can be touched while `let_touch` allows it."""
        for parameter in group.fsdp_params:
            parameter.__class__ = TouchableParameter
            _places[parameter.sharded_param] = self, group, parameter
            self._shards.append(parameter.sharded_param)

    def let_touch(self, allowed: bool) -> None:
        """Sets whether parameters can be touched from now on. If not, touched ones are released."""
        self.may_be_touched = allowed
        for shard in self._shards:
            shard.__class__ = TouchableShard if allowed else DTensor
        if not allowed:
            self.let_go()
            _make_plain(shard.grad for shard in self._shards)

    def let_go(self) -> None:
        """Frees parameters that were gathered when touched. Their gradients wait for the step."""
        for group in self._touched:
            group.let_touched_go()
        self._touched.clear()

    def gather(self, group: Any, name: str) -> None:
        """A parameter of `group` is touched; a collective."""
        if not group.is_held:
            self._meet(get_process_group_ranks(group._all_gather_process_group), name)
            self._touched[group] = None
        group.hold_touched()


# -- as shards


def _as_shards(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _of_shards(func: Any, args: Any, kwargs: Any) -> Any:
    if func == _SET_DATA:
        with torch.no_grad():
            func, args = Tensor.copy_, (args[0], _cut_as(args[0], args[1]))
    elif func == _SET_GRAD and isinstance(args[1], Tensor):
        args = args[0], _cut_as(args[0], args[1])
    elif func == _GET_GRAD:
        return _as_value(_as_shards(func, args, kwargs))
    if args and isinstance(args[0], DTensor) and changes_its_first(func):  # which cannot get another layout
        plain = [isinstance(v, Tensor) and not isinstance(v, DTensor) and v.shape == args[0].shape for v in args]
        args = tuple(_cut_as(args[0], v) if is_plain else v for v, is_plain in zip(args, plain, strict=True))
    with torch._C.DisableTorchFunctionSubclass(), plain_beside_dtensors():
        if func in _READS:
            args = args[0].full_tensor(), *args[1:]
        with torch.set_grad_enabled(torch.is_grad_enabled() and func is not Tensor.copy_):
            result = func(*args, **kwargs)
    return tree_map(_as_value, result)


def _cut_as(shard: Any, values: Tensor) -> Tensor:
    if isinstance(values, DTensor):
        return values
    return distribute_tensor(values.detach(), shard.device_mesh, shard.placements, src_data_rank=None)


def _as_value(value: Any) -> Any:
    if type(value) is DTensor:
        value.__class__ = ShardValue
    return value


def _make_plain(gradients: Iterable[Any]) -> None:
    for gradient in gradients:
        if type(gradient) is ShardValue:
            gradient.__class__ = DTensor  # type: ignore[assignment]


def _is_other_shard(value: Any) -> bool:
    return type(value) in (DTensor, ShardValue) and any(dim.is_shard() or dim.is_partial() for dim in value.placements)


# -- as whole parameters


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of `func` for whole parameters; graphs gather them again if they are freed before backward."""
    touched = [value for value in tree_iter((args, kwargs)) if type(value) is TouchableShard]
    args, kwargs = tree_map(_whole, (args, kwargs))
    if not torch.is_grad_enabled() and any(isinstance(value, DTensor) for value in tree_iter((args, kwargs))):
        return _of_shards(func, args, kwargs)  # of split layers
    saved = _places[touched[0]][1]._local_gradients.saved if touched else None
    if saved is None or not saved.begin():
        return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    finally:
        saved.end()


def _whole(value: Any) -> Any:
    if type(value) is not TouchableShard:
        return value
    shard: Any = value
    shards, group, parameter = _places[shard]
    if not shards.may_be_touched:  # a tensor taken from a parameter in a step, and kept
        shard.__class__ = DTensor
        return shard
    shards.gather(group, parameter._param_fqn)
    whole = parameter._unsharded_param
    takes_gradients = shard.requires_grad and whole.requires_grad and torch.is_grad_enabled()
    if group.is_in_half_precision(parameter):
        full = group.in_full_precision(parameter)
        # The values are exact, and the gradient goes the way of those of forwards.
        return full + (whole.to(full.dtype) - whole.detach().to(full.dtype)) if takes_gradients else full
    return whole if takes_gradients or not whole.requires_grad or shard.requires_grad else whole.detach()


def _copied(value: Any) -> Any:
    """A copy of a touchable parameter, with the values of all ranks; anything else as it is."""
    if type(value) is not TouchableShard:
        return value
    copy = _whole(value).detach().clone()
    return nn.Parameter(copy, value.requires_grad) if isinstance(value, nn.Parameter) else copy


def _set_requires_grad(func: Any, args: Any, kwargs: Any) -> Any:
    shard = args[0]
    result = _as_shards(func, args, kwargs)
    parameter = _places[shard][2]
    whole = vars(parameter).get("_unsharded_param")
    if whole is not None and shard is parameter.sharded_param:  # not what `detach` gave
        whole.requires_grad_(shard.requires_grad)
    return result


def _write(func: Any, shard: Any, args: Any, kwargs: Any) -> Any:
    """Writes to `shard`, the first argument: by way of the whole parameter if plain tensors are written."""
    shards, group, parameter = _places[shard]
    values = list(tree_iter((args, kwargs)))
    is_plain = any(isinstance(v, Tensor) and not isinstance(v, DTensor) and v.ndim for v in values)
    has_others = any(map(_is_other_shard, values))
    if shards.may_be_touched and (is_plain or group.is_held or func in _RANDOM or not args) and not has_others:
        _on_whole(func, args, kwargs)
        if group.is_in_half_precision(parameter):
            group.write_full_precision(parameter)
        return shard
    if group.is_held:
        group.write_back(also_unseen=True)
    _as_shards(func, args, kwargs) if not is_plain else _of_shards(func, args, kwargs)
    group.is_stale = group.is_unsharded
    return shard
