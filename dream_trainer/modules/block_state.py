"""State that a block's forward may change besides gradients, so that its second run in a backward changes nothing.

Each call notes attributes, buffers, lists and dicts, and copies the tensors that a forward writes into.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.errors import StepError

# Internals of `nn.Module`, including parameters, which a second run uses as they are then.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}

Key = tuple[int, str]  # the place of a module in its block, and the name of an attribute or a buffer


class Moves:
    """Observed writes of one block's forwards."""

    def __init__(self) -> None:
        self.written: set[Key] = set()  # attributes and buffers that hold tensors which a forward writes into
        self.modes: set[tuple[bool, ...]] = set()  # the observed train/eval modes of the block's modules
        self.versions: dict[Key, int] = {}  # writes to each other one by the end of the last forward


class BlockState:
    """The state of a block, as it is now."""

    def __init__(self, block: nn.Module, given: Any, moves: Moves) -> None:
        self._moves = moves
        modules = list(block.modules())
        self._contents: list[tuple[Any, Any]] = []  # each container with its content
        self._noted: list[tuple[Key, Tensor]] = []
        for index, module in enumerate(modules):
            self._note(vars(module), index)
            if module._buffers:
                self._note(module._buffers, index)
        self._modes = tuple([module.training for module in modules])
        self._versions = [tensor._version for _, tensor in self._noted]
        self.is_new = self._modes not in moves.modes or any(
            key not in moves.written and moves.versions.get(key) != version
            for (key, _), version in zip(self._noted, self._versions, strict=True)
        )
        self._copies = {id(tensor): _copy(tensor) for key, tensor in self._noted if self.is_new or key in moves.written}
        self._n_own = len(self._contents)
        self._contents += [(container, _content(container)) for container in _containers(given)]

    def _note(self, attributes: dict[str, Any], index: int) -> None:
        content = _content(attributes)
        self._contents.append((attributes, content))
        for name, value in content.items():
            if isinstance(value, Tensor):
                self._noted += [((index, name), tensor) for tensor in tensors_in((value,))]
            elif isinstance(value, list | dict | tuple | set | deque):
                for container in _containers(value):
                    self._contents.append((container, _content(container)))
                self._noted += [((index, name), tensor) for tensor in tensors_in(value)]

    def look(self, block: str) -> None:
        """Notes what the forward since then has written into; waits for the device if that is not known yet."""
        moves = self._moves
        for (key, tensor), version in zip(self._noted, self._versions, strict=True):
            if key in moves.written:
                continue
            if self.is_new:
                if tensor._version != version or not _is_same(tensor, self._copies[id(tensor)]):
                    moves.written.add(key)
            elif tensor._version != version:
                raise StepError(
                    f"{block} wrote into {key[1]!r}, but its first forwards did not, so activation checkpointing "
                    "has no copy of its former content. Resume from the last checkpoint, which detects it again; or "
                    "write into it in each forward, or leave this block out of activation checkpointing."
                )
        moves.modes.add(self._modes)
        moves.versions = {key: tensor._version for key, tensor in self._noted if key not in moves.written}
        written = {id(tensor) for key, tensor in self._noted if key in moves.written}
        self._copies = {number: copy for number, copy in self._copies.items() if number in written}

    def let_graphs_go(self) -> None:
        """Keeps only the values of tensors that earlier forwards left on modules, since their graphs hold memory."""
        for _, content in self._contents[: self._n_own]:
            if isinstance(content, dict):
                for name, value in content.items():
                    if isinstance(value, Tensor) and value.grad_fn is not None:
                        content[name] = _without_graph(value)
            elif isinstance(content, list):
                content[:] = [
                    _without_graph(value) if isinstance(value, Tensor) and value.grad_fn is not None else value
                    for value in content
                ]

    def put_in_place(self) -> list[tuple[Any, Any]]:
        """Puts a copy of this state in the block's place; gives what was there, for `put_back`."""
        before = [(container, _content(container)) for container, _ in self._contents]
        fresh = {number: _copy(copy) for number, copy in self._copies.items()}
        for container, content in self._contents:
            _fill(container, _replaced(content, fresh) if fresh else content)
        return before


def put_back(before: list[tuple[Any, Any]]) -> None:
    for container, content in before:
        _fill(container, content)


def _containers(tree: Any) -> Iterator[Any]:
    """The lists, dicts, sets and deques in `tree`, from the outermost."""
    if isinstance(tree, list | dict | set | deque):
        yield tree
    if isinstance(tree, list | tuple | dict | deque):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers(child)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in `tree` that a forward may write numbers into: no parameters."""
    if isinstance(tree, Tensor):
        if not isinstance(tree, nn.Parameter) and not tree.is_inference() and not tree.is_meta:
            yield tree
    elif isinstance(tree, list | tuple | dict | deque):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(child)


def _content(container: Any) -> Any:
    """A flat copy; of a module's attributes without those of `nn.Module`."""
    if isinstance(container, dict):
        if "_modules" in container:
            return {name: value for name, value in container.items() if name not in _OF_MODULES}
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _fill(container: Any, content: Any) -> None:
    """Makes a container hold what `content` does; one that does already is not touched."""
    if isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif isinstance(container, dict):
        now = _content(container)
        for name in now.keys() - content.keys():
            del container[name]
        for name, value in content.items():
            if name not in now or now[name] is not value:
                container[name] = value
    elif not any(isinstance(value, nn.Parameter) for value in container):
        is_same = len(container) == len(content) and all(map(operator.is_, container, content))
        if not is_same:
            container.clear()
            container.extend(content)


def _replaced(content: Any, fresh: Mapping[int, Tensor]) -> Any:
    if isinstance(content, dict):
        return {name: fresh.get(id(value), value) for name, value in content.items()}
    return content if isinstance(content, set) else [fresh.get(id(value), value) for value in content]


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@torch.no_grad()
def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_same(tensor: Tensor, copy: Tensor) -> bool:
    return tensor.shape == copy.shape and tensor.dtype == copy.dtype and torch.equal(tensor, copy)
