"""What a computation is, as a value: two tensors have the same if the same operations made them of the same ones.

`TorchDispatchMode` is private; `tests/compat/test_computation.py` exercises what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# They give what only the shape of their argument says.
_OF_SHAPE = ("new_", "ones_like", "zeros_like", "full_like", "empty_like")


class Computation(TorchDispatchMode):
    """Gives every tensor that is computed while it is on a number that says how.

    Numbers of random draws are those of the operation: two of the same tensor are one. What is written into a part of a
    tensor is not seen in the whole.

    Attributes:
        operations: The operation that first gave each number and its place, by number, in order.
    """

    def __init__(self, where: Callable[[], str] = str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no `id` is given twice
        self.operations: dict[int, tuple[str, str]] = {}

    def name(self, names: Mapping[Tensor, str]) -> None:
        """Says what tensors are that were made outside."""
        for tensor, name in names.items():
            self._note(tensor, _hash(name))

    def number_of(self, tensor: Tensor) -> int:
        """How `tensor` was computed."""
        if id(tensor) not in self._numbers:
            values = tensor.flatten().tolist() if tensor.device.type == "cpu" and tensor.numel() <= 64 else ""
            self._note(tensor, _hash(f"{tuple(tensor.shape)} {tensor.dtype} {values}"))
        return self._numbers[id(tensor)]

    def _note(self, tensor: Tensor, number: int) -> None:
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        spell = _shapes if func._schema.name.removeprefix("aten::").startswith(_OF_SHAPE) else self._spelled
        made_of = _hash(f"{func} {spell(args)} {spell(kwargs)}")
        result = func(*args, **kwargs)
        written = [
            value
            for place, declared in enumerate(func._schema.arguments)
            if declared.alias_info is not None and declared.alias_info.is_write
            for value in [args[place] if place < len(args) else kwargs.get(declared.name)]
            if isinstance(value, Tensor)
        ]
        results = result if isinstance(result, tuple | list) else (result,)
        for place, tensor in enumerate([*written, *results]):
            if isinstance(tensor, Tensor):
                number = made_of if place < len(written) else _hash(f"{made_of} {place - len(written)}")
                self._note(tensor, number)
                if number not in self.operations:
                    self.operations[number] = str(func), self._where()
        return result

    def _spelled(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"#{self.number_of(value)}"
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(self._spelled, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}: {self._spelled(item)}' for key, item in value.items())}}}"
        return repr(value)


def _shapes(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return f"[{', '.join(map(_shapes, value))}]" if isinstance(value, tuple | list) else repr(value)


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def tensor_names(module: nn.Module) -> dict[Tensor, str]:
    """Parameters and buffers of `module` by name; one that has several by its first."""
    names: dict[Tensor, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        names.setdefault(tensor, name)
    return names


def on_meta() -> torch.device:
    """A context in which what is made without a device is on meta."""
    return torch.device("meta")
