"""What is known of tensors, kept as long as each of them lives, by a class of `torch.utils.weak`."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

from torch import Tensor

V = TypeVar("V")


class OfTensors(Generic[V]):
    """A value for each tensor, by identity. A tensor's python object may die before the tensor does, and come back:
    `WeakKeyDictionary` would have forgotten it."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self._values = WeakTensorKeyDictionary()

    def set(self, tensor: Tensor, value: V) -> None:
        """Keeps `value` for `tensor`, instead of an earlier one."""
        self._values[tensor] = value

    def get(self, tensor: Tensor) -> V | None:
        """The value of `tensor`; None if it has none."""
        return cast("V | None", self._values.get(tensor))

    def clear(self) -> None:
        """Forgets all of them."""
        self._values.clear()
