"""Nested state of lists, tuples and dicts: its tensors by path, such as `("GG", 0)`, and the rest for typed JSON.

Tensors under a string key of the first level are in `tensors`, as in 0.1's format. Deeper ones are in `nested`, with
None in their place in `values`. A model's parameter, as a key or a value, is stored as its name."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dream_trainer.compat.pytorch import local_tensor

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


def paths_in(record: Mapping[str, Any]) -> list[TensorPath]:
    return [(key,) for key in record["tensors"]] + [tuple(path) for path in record.get("nested", ())]


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
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    a, b = local_tensor(one.detach()), local_tensor(other.detach())
    return a.shape == b.shape and bool(((a == b.to(a.device)) | ((a != a) & (b != b).to(a.device))).all())


def _is_parameter(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and value[0] == _PARAMETER


def _mapped(value: Any, change: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """A list, tuple or dict whose keys and entries are what `change` makes of them; anything else as it is."""
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
