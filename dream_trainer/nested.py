"""Tensors inside arbitrarily nested batches: moving them, detaching them, joining batches. A batch may be a tensor,
dict, list, tuple, namedtuple, dataclass, any mapping (`defaultdict`, Hugging Face's `BatchEncoding`) or an object with
its own `.to(device)`. Everything else (None, strings, numbers) passes through. Containers keep their type and are never
changed in place: unchanged parts are shared with the result, changed parts are rebuilt. Torch's own pytree is not used
because it is private and costs four times more (10.4 against 2.5 us for 4 tensors)."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@runtime_checkable
class Movable(Protocol):
    """An object that knows by itself how to get to a device, e.g. `PackedSequence`, `TensorDict`."""

    def to(self, device: torch.device) -> Any:
        """The object on `device`."""


@runtime_checkable
class NamedTupleLike(Protocol):
    """The interface of every `collections.namedtuple`."""

    @classmethod
    def _make(cls, iterable: Iterable[Any], /) -> Self: ...


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Applies `fn` to every tensor in `tree` and returns the same structure; `tree` itself if nothing changed."""
    if isinstance(tree, Tensor):
        return fn(tree)
    return map_children(lambda child: map_tensors(fn, child), tree)


def to_device(tree: Any, device: torch.device) -> Any:
    """`tree` with every tensor on `device`; the same object if nothing has to move. The host waits for no copy to CUDA:
    tensors that are not in pinned memory are copied there first. An object with its own `.to` is asked to move itself,
    except dicts and `UserDict`s: `BatchEncoding.to` changes the caller's batch in place."""
    kind = type(tree)
    if kind is Tensor:
        return tree if tree.device == device else _copied(tree, device)
    # The usual batches, unrolled: a lambda for each level costs more than the checks themselves.
    if kind is dict:
        moved = {key: to_device(value, device) for key, value in tree.items()}
        for key in tree:
            if moved[key] is not tree[key]:
                return moved
        return tree
    if kind is tuple or kind is list:
        items = [to_device(value, device) for value in tree]
        for new, old in zip(items, tree, strict=True):
            if new is not old:
                return items if kind is list else tuple(items)
        return tree
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=tree.is_pinned())
    if isinstance(tree, Movable) and not isinstance(tree, (dict, UserDict)):
        return tree.to(device)
    return map_children(lambda child: to_device(child, device), tree)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.layout is torch.strided:
        return tensor.pin_memory().to(device, non_blocking=True)  # itself if it is pinned
    return tensor.to(device, non_blocking=tensor.is_pinned())


def detach(tree: Any) -> Any:
    """`tree` with every tensor detached from its autograd graph, so that keeping it does not keep the graph."""
    return map_tensors(lambda tensor: tensor.detach() if tensor.requires_grad else tensor, tree)


def concatenated(trees: Sequence[Any], say_uneven: Callable[[list[Any]], None]) -> Any:
    """Batches of one structure as a single one: tensors joined along their first dimension, other parts as lists."""
    first = trees[0] if trees else None
    if isinstance(first, Tensor) and first.dim() > 0:
        if any(tree.shape[1:] != first.shape[1:] for tree in trees):
            say_uneven(list(trees))
            return list(trees)
        return torch.cat(list(trees))
    if isinstance(first, Mapping):
        return {key: concatenated([tree[key] for tree in trees], say_uneven) for key in first}
    if isinstance(first, tuple | list) and all(isinstance(item, Tensor) for item in first):
        return tuple(concatenated(items, say_uneven) for items in zip(*trees, strict=True))
    return list(trees)


def map_children(visit: Callable[[Any], Any], tree: Any) -> Any:
    """Rebuilds one container from its visited children; anything that is not a container is returned as it is."""
    if isinstance(tree, Mapping):
        changed = {key: new for key, old in tree.items() if (new := visit(old)) is not old}
        return _with_items(tree, changed) if changed else tree
    if isinstance(tree, (list, tuple)):
        items = [visit(value) for value in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return tree._make(items) if isinstance(tree, tuple) and isinstance(tree, NamedTupleLike) else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {field.name: attrgetter(field.name)(tree) for field in dataclasses.fields(tree)}
        changed = {name: new for name, old in values.items() if (new := visit(old)) is not old}
        tree = copy.copy(tree) if changed else tree  # `replace` would rerun `__post_init__` and refuse `init=False`
        for name, value in changed.items():
            object.__setattr__(tree, name, value)  # frozen ones too
    return tree


def _with_items(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    """A copy of `mapping` with `changed` values, keeping its class and extras (default factory, encodings)."""
    if not isinstance(mapping, MutableMapping):
        return type(mapping)({**mapping, **changed})  # type: ignore[call-arg]
    if isinstance(mapping, OrderedDict) and type(mapping).__reduce__ is OrderedDict.__reduce__:
        result: Any = type(mapping).__new__(type(mapping))  # copy.copy calls the class without arguments
        vars(result).update(vars(mapping))
        OrderedDict.update(result, mapping)
    else:
        result = copy.copy(mapping)
    for key, value in changed.items():
        result[key] = value
    return result  # type: ignore[no-any-return]


def leaves(tree: Any) -> Iterator[Any]:
    """The parts of `tree` that are not containers, in order."""
    children: Iterable[Any]
    if isinstance(tree, Mapping):
        children = tree.values()
    elif isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        children = tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        children = (attrgetter(field.name)(tree) for field in dataclasses.fields(tree))
    else:
        yield tree
        return
    for child in children:
        yield from leaves(child)
