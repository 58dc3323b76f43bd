"""Where the values of parameters came from: what `load_weights` filled, for as long as the parameter lives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dream_trainer.compat.weak_tensors import OfTensors


class Origin(NamedTuple):
    """A tensor in a file."""

    path: str
    """What was loaded, as an absolute path."""
    name: str
    """The tensor's name there."""


_origins = OfTensors[Origin]()


def remember_origin(tensor: Tensor, origin: Origin) -> None:
    """Remembers that `tensor` was filled from there."""
    _origins.set(tensor, origin)


def origin_of(tensor: Tensor) -> Origin | None:
    """Where `tensor` was filled from last; None if not by `load_weights`."""
    return _origins.get(tensor)
