"""Nested state of lists, tuples and dicts: its tensors by path, such as `("GG", 0)`, and the rest for typed JSON.

Tensors under a string key of the first level are in `tensors`, as in 0.1's format. Deeper ones are in `nested`, with
None in their place in `values`. A model's parameter, as a key or a value, is stored as its name."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.errors import CheckpointError

TensorPath = tuple[Any, ...]

_PARAMETER = "dream_trainer.parameter"


def split_state(
    state: Mapping[Any, Any], names: Mapping[Tensor, str]
) -> tuple[dict[str, Any], dict[TensorPath, Tensor]]:
    """A record of nested state without its tensors, for `joined_state`, and the tensors by path."""
    found: dict[TensorPath, Tensor] = {}
    values = _without_tensors(state, names, found, ())
    top = [path[0] for path in found if not path[1:] and isinstance(path[0], str)]
    record: dict[str, Any] = {"tensors": sorted(top), "values": {k: v for k, v in values.items() if k not in top}}
    nested = [list(path) for path in found if path[1:] or not isinstance(path[0], str)]
    return record | ({"nested": nested} if nested else {}), found


def joined_state(
    record: Mapping[str, Any], tensors: Mapping[TensorPath, Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[Any, Any]:
    values = dict(record["values"]) | dict.fromkeys(record["tensors"])
    joined: dict[Any, Any] = _with_tensors(values, tensors, parameters, ())
    return joined


def path_text(path: TensorPath) -> str:
    """A path as part of a tensor's name: `GG.0`."""
    return ".".join(str(part[1]) if _is_parameter(part) else str(part) for part in path)


def parameter_in(path: TensorPath) -> str | None:
    return next((part[1] for part in path if _is_parameter(part)), None)


def first_difference(given: Any, found: Any, ignored: str, path: TensorPath = ()) -> TensorPath | None:
    """The path of the first value in `given` that `found` has otherwise; None if there is none."""
    if isinstance(given, Tensor) or isinstance(found, Tensor):
        return None if _is_same_tensor(given, found) else path
    if isinstance(given, Mapping) and isinstance(found, Mapping):
        if given.keys() != found.keys():
            return (*path, next(iter(given.keys() ^ found.keys())))
        pairs: Iterator[tuple[Any, Any, Any]] = ((key, given[key], found[key]) for key in given if key != ignored)
    elif isinstance(given, list | tuple) and isinstance(found, list | tuple) and len(given) == len(found):
        pairs = ((index, *pair) for index, pair in enumerate(zip(given, found, strict=True)))
    else:
        return None if repr(given) == repr(found) else path
    return next((where for key, a, b in pairs if (where := first_difference(a, b, ignored, (*path, key)))), None)


def _is_same_tensor(one: Any, other: Any) -> bool:
    """Whether both are tensors of the same bits, wherever they lie."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or type(one) is not type(other):
        return False
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    a, b = local_tensor(one.detach()), local_tensor(other.detach())
    return a.shape == b.shape and bool(((a == b.to(a.device)) | ((a != a) & (b != b).to(a.device))).all())


def _is_parameter(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and value[0] == _PARAMETER


def _mapped(value: Any, change: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """A list, tuple or dict with `change` applied to its keys and entries; anything else as it is."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(change(index, entry)[1] for index, entry in enumerate(value))
    if kind in (dict, OrderedDict, defaultdict):
        changed = value.copy()  # a defaultdict keeps its factory
        changed.clear()
        changed.update(change(key, entry) for key, entry in value.items())
        return changed
    return value


def _without_tensors(value: Any, names: Mapping[Tensor, str], found: dict[TensorPath, Tensor], path: TensorPath) -> Any:
    def named(key: Any) -> Any:
        return (_PARAMETER, names[key]) if isinstance(key, nn.Parameter) and key in names else key

    def change(key: Any, entry: Any) -> tuple[Any, Any]:
        key = named(key)
        return key, _without_tensors(entry, names, found, (*path, key))

    if not isinstance(value, Tensor):
        return _mapped(value, change)
    if (name := named(value)) is not value:
        return name
    found[path] = value.detach()
    return None


def _with_tensors(
    value: Any, tensors: Mapping[TensorPath, Tensor], parameters: Mapping[str, nn.Parameter], path: TensorPath
) -> Any:
    def unnamed(key: Any) -> Any:
        return parameters[key[1]] if _is_parameter(key) else key

    def change(key: Any, entry: Any) -> tuple[Any, Any]:
        return unnamed(key), _with_tensors(entry, tensors, parameters, (*path, key))

    if path in tensors:
        return tensors[path]
    return unnamed(value) if _is_parameter(value) else _mapped(value, change)


# -- Optimizers whose class defines `state_dict`: its result is restored by the class's `load_state_dict`.
#
# The optimizer's state afterwards is compared with it, since casts and forgetful methods raise no error.


MACHINE_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of groups that checkpoints leave out: parameters, their names, and the machine's implementation."""

_GROUPS = "param_groups"


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether its class overrides `state_dict` or `load_state_dict`."""
    kind = type(optimizer)
    return kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict


@torch.no_grad()
def load_own_state(name: str, optimizer: Optimizer, make: Callable[[], dict[str, Any]], *, with_options: bool) -> None:
    """Restores an optimizer's own `state_dict`, with the parameters of this process."""
    before, here = optimizer.param_groups, optimizer.state_dict()
    given, taken = make(), make()
    for state in (given, taken):
        _take_parameters_of(here, state, with_options=with_options)
    optimizer.load_state_dict(taken)
    for former, group in zip(before, optimizer.param_groups, strict=True):
        for key, value in group.items():
            kept = former.get(key)
            if isinstance(value, Tensor) and isinstance(kept, Tensor) and kept.shape == value.shape:
                group[key] = kept.copy_(value)  # a scheduler or a compiled step may refer to this tensor
    _take_types_back(given, optimizer.state_dict())
    where = first_difference(given, optimizer.state_dict(), _GROUPS)
    if where is not None:
        raise CheckpointError(
            f"load_state_dict() of {type(optimizer).__name__} (optimizer {name!r}) did not bring back "
            f"{path_text(where) or 'its state'}, which state_dict() had saved. Have load_state_dict take back all that "
            "state_dict gives, by positions or parameters: the ids of objects are other ones in each process."
        )


def _take_parameters_of(here: Any, state: Any, *, with_options: bool) -> None:
    """Groups in `state` get the parameters of `here`, and its choice of implementation."""
    if isinstance(here, list | tuple) and isinstance(state, list | tuple):
        for one, other in zip(here, state, strict=False):
            _take_parameters_of(one, other, with_options=with_options)
    if not isinstance(here, dict) or not isinstance(state, dict):
        return
    for key, value in state.items():
        if key == _GROUPS:
            state[key] = [
                (group if with_options else {})
                | {option: v for option, v in now.items() if not with_options or option in MACHINE_OPTIONS}
                for group, now in zip(value, here.get(key) or value, strict=True)
            ]
        else:
            _take_parameters_of(here.get(key), value, with_options=with_options)


def _take_types_back(given: Any, now: Any) -> None:
    """Tensors in dicts that have another type now are those that were given."""
    if isinstance(given, dict) and isinstance(now, dict):
        for key, value in given.items():
            found = now.get(key)
            if isinstance(value, Tensor) and isinstance(found, Tensor) and found.dtype != value.dtype:
                now[key] = value
            else:
                _take_types_back(value, found)
    elif isinstance(given, list | tuple) and isinstance(now, list | tuple):
        for one, other in zip(given, now, strict=False):
            _take_types_back(one, other)
