"""How much memory tensors hold, whatever class they are of, and how much a forward keeps for its backward.

`tests/compat/test_kept_bytes.py` exercises the names that are not public in PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from dream_trainer.compat.pytorch import storage_id, write_count


class Held:
    """Storages, each once: those that other tensors are views of, and this rank's part of those that are split."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}  # kept, so that no other storage gets the identity of one

    def add(self, tree: Any) -> None:
        """Adds the tensors in containers of any kind."""
        for leaf in tree_leaves(tree):
            for tensor in _plain(leaf):
                self._tensors[storage_id(tensor)] = tensor

    def n_bytes(self, *without: Held | Remembered) -> int:
        """Of all of them, but for those that one of `without` has too."""
        kept = (tensor for number, tensor in self._tensors.items() if not any(number in other for other in without))
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)

    def __contains__(self, number: int) -> bool:
        return number in self._tensors

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors.values())

    def n_writes(self) -> int:
        """In-place operations that have gone through them."""
        return sum(map(write_count, self._tensors.values()))


class Remembered:
    """Storages of which only the identity is kept, not the memory."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}  # as long as there is one, no other storage gets its identity

    def add(self, held: Held) -> None:
        """Adds those of `held`."""
        self._storages |= {storage_id(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in held}

    def __contains__(self, number: int) -> bool:
        return number in self._storages


def _plain(leaf: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: a DTensor's shard, the data and the scale of one in float8."""
    if not isinstance(leaf, Tensor):
        return
    if not is_traceable_wrapper_subclass(leaf):
        yield leaf
        return
    for name in leaf.__tensor_flatten__()[0]:
        yield from _plain(getattr(leaf, name))


class _Outputs(TorchDispatchMode):
    def __init__(self, operations: Collection[Any], held: Held) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations, self._held = frozenset(operations), held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in self._operations:
            self._held.add(output)
        return output


@contextmanager
def noted(saved: Held, outputs: Held, operations: Collection[Any]) -> Iterator[None]:
    """Inside, `saved` gets what forwards keep for their backward, and `outputs` the results of `operations`."""

    def pack(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # a graph that holds its own tensors would never be freed
        saved.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Outputs(operations, outputs):
        yield
