"""JSON that restores exactly what was written: the types in the state of optimizers, schedulers, callbacks, generators.

    {0: (1, nan)}  ->  {"$dict": [[0, {"$tuple": [1, {"$float": "nan"}]}]]}

Other types, subclasses included, raise a TypeError with the path. Reading uses no pickle, eval or dynamic import.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_ARRAY_BYTES = 1 << 20
# Size of the largest tensor or array that is written in JSON; larger ones belong among the tensors.

_TORCH_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple, Counter)},
}
_NUMPY_KINDS = "biufcSUmM"


def dumps(obj: Any, *, name: str = "") -> str:
    return json.dumps(_encode(obj, name), allow_nan=False, ensure_ascii=False)


def loads(text: str | bytes) -> Any:
    """Reads what `dumps` wrote; ValueError if the text is not of this form."""
    try:
        return json.loads(text, object_hook=_decode, parse_constant=_refuse_constant)
    except (TypeError, KeyError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not typed JSON: {error}") from error


def _encode(obj: Any, path: str) -> Any:
    kind = type(obj)
    if obj is None or kind in (bool, int, str):
        return obj
    if kind is float:
        return obj if math.isfinite(obj) else {"$float": repr(obj)}
    if kind is list:
        return _items(obj, path)
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in obj):
            return {key: _encode(value, _join(path, key)) for key, value in obj.items()}
        return {"$dict": _pairs(obj, path)}
    tag = _TAGS.get(kind)
    if tag is not None:
        return {tag: _TYPES[tag][1](obj, path)}
    if isinstance(obj, np.generic):
        return {"$numpy": _array(np.asarray(obj), path)}
    raise TypeError(
        f"{path or 'the value'}: {kind} cannot be kept in a checkpoint's JSON. "
        "Save plain values (numbers, strings, lists, dicts, small tensors), and rebuild the object from them on load."
    )


def _join(path: str, key: object) -> str:
    part = key if isinstance(key, str) else f"[{key!r}]"
    return f"{path}.{part}" if path and isinstance(key, str) else f"{path}{part}"


def _pairs(obj: dict[Any, Any], path: str) -> list[list[Any]]:
    return [[_encode(key, f"{path}<key>"), _encode(value, _join(path, key))] for key, value in obj.items()]


def _items(obj: Any, path: str) -> list[Any]:
    return [_encode(value, f"{path}[{index}]") for index, value in enumerate(obj)]


def _text(obj: Any, path: str) -> str:
    return str(obj)


def _defaultdict(obj: defaultdict[Any, Any], path: str) -> dict[str, Any]:
    for name, factory in _FACTORIES.items():
        if obj.default_factory is factory:
            return {"factory": name, "items": _pairs(obj, path)}
    raise TypeError(
        f"{path}: a defaultdict's factory must be a built-in type to be kept in a checkpoint, and this one's is "
        f"{obj.default_factory!r}. Save dict(...) and rebuild it on load."
    )


def _stored(dtype: str, shape: Sequence[int], content: bytes, path: str) -> dict[str, Any]:
    if len(content) > MAX_ARRAY_BYTES:
        raise TypeError(
            f"{path or 'the value'}: an array of {len(content)} bytes is too large for a checkpoint's JSON (at most "
            f"{MAX_ARRAY_BYTES}). Put it among the tensors."
        )
    return {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(content).decode("ascii")}


def _array(obj: np.ndarray, path: str) -> dict[str, Any]:
    if obj.dtype.kind not in _NUMPY_KINDS:
        raise TypeError(f"{path or 'the value'}: a numpy array of {obj.dtype!r} cannot be kept in a checkpoint's JSON.")
    return _stored(obj.dtype.str, obj.shape, obj.tobytes(), path)


def _tensor(obj: Tensor, path: str) -> dict[str, Any]:
    if obj.layout is not torch.strided or obj.is_quantized or obj.is_meta:
        raise TypeError(f"{path or 'the value'}: only dense tensors with values can be kept in a checkpoint's JSON.")
    # Conjugate and negative views are lazy: resolved, so that the bits stored are those of the values.
    values = obj.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    content = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return _stored(str(obj.dtype), obj.shape, content, path)


def _unordered(obj: Any, path: str) -> list[Any]:
    # Sorted: a set of strings has another order in each process, and equal states must give equal text.
    return sorted((_encode(value, f"{path}<item>") for value in obj), key=json.dumps)


def _decode(obj: dict[str, Any]) -> Any:
    if len(obj) != 1:
        return obj
    ((tag, value),) = obj.items()
    if not tag.startswith("$"):
        return obj
    return _DECODERS[tag](value)  # a tag of a newer version is a KeyError


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"not typed JSON: bare {text}")


def _load_array(value: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"]).copy()


def _load_tensor(value: dict[str, Any]) -> Tensor:
    dtype, content = _TORCH_DTYPES[value["dtype"]], base64.b64decode(value["data"])
    if not content:
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(value["shape"])


# By their tags: the type, what is written of an object at a path, and what makes one of that.
_TYPES: dict[str, tuple[type, Callable[[Any, str], Any], Callable[[Any], Any]]] = {
    "$tuple": (tuple, _items, tuple),
    "$set": (set, _unordered, set),
    "$frozenset": (frozenset, _unordered, frozenset),
    "$counter": (Counter, _pairs, lambda value: Counter(dict(value))),
    "$ordered": (OrderedDict, _pairs, OrderedDict),
    "$defaultdict": (defaultdict, _defaultdict, lambda v: defaultdict(_FACTORIES[v["factory"]], v["items"])),
    "$bytes": (bytes, lambda obj, path: base64.b64encode(obj).decode("ascii"), base64.b64decode),
    "$complex": (complex, lambda obj, path: _items((obj.real, obj.imag), path), lambda v: complex(*v)),
    "$datetime": (datetime, lambda obj, path: obj.isoformat(), datetime.fromisoformat),
    "$timedelta": (timedelta, lambda obj, path: [obj.days, obj.seconds, obj.microseconds], lambda v: timedelta(*v)),
    "$ndarray": (np.ndarray, _array, _load_array),
    "$tensor": (Tensor, _tensor, _load_tensor),
    "$dtype": (torch.dtype, _text, _TORCH_DTYPES.__getitem__),
    "$device": (torch.device, _text, torch.device),
    "$size": (torch.Size, _items, torch.Size),
    "$path": (PosixPath, _text, Path),
    "$purepath": (PurePosixPath, _text, PurePosixPath),
}
_TAGS = {kind: tag for tag, (kind, _, _) in _TYPES.items()}
_DECODERS = {tag: decode for tag, (_, _, decode) in _TYPES.items()}
_DECODERS |= {"$float": float, "$dict": dict, "$numpy": lambda value: _load_array(value)[()]}


# -- Nested state of lists, tuples and dicts: its tensors by path, and the rest for typed JSON.
#
# Tensors under a string key of the first level are in `tensors`, as in 0.1's format. Deeper ones are in `nested`, with
# None in their place in `values`. A model's parameter, as a key or a value, is stored as its name.


_PARAMETER = "dream_trainer.parameter"

TensorPath = tuple[Any, ...]  # such as `("GG", 0)`


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
