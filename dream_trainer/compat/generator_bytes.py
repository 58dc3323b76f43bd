"""The states of the global CPU generators of torch, python and numpy as bytes.

To save python's, `random.getstate` makes 625 numbers of it, and `numpy.random.get_state` an array and a dict: 12 and 42
microseconds, and 4 and 47 to put it back. The bytes behind them are read and written in 0.1, which makes it cheap
enough to keep draws apart, and to see whether there were any, at each batch.
"""

from __future__ import annotations

import _random
import ctypes
import random
import struct
import sys
from typing import Any

import torch

PythonState = tuple[Any, Any]
"""The generator's bytes and the second of a pair of `random.gauss`; two states are equal if nothing was drawn."""

# What CPython's `_random.Random` holds behind the header of an object: the position and the words of its Mersenne
# Twister.
_PYTHON_LAYOUT = struct.Struct("=i624I")
# numpy's, behind the address that its `ctypes` interface gives: the words and the position.
_NUMPY_SIZE = struct.calcsize("=624Ii")

_generator = random.random.__self__  # type: ignore[attr-defined]  # a bound method of the one that the module draws from


def _python_memory() -> Any:
    """The memory of python's generator; None in a Python that lays it out otherwise."""
    offset, size = object.__basicsize__, _PYTHON_LAYOUT.size
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < offset + size:
        return None
    memory = (ctypes.c_char * size).from_address(id(_generator) + offset)
    position, *words = _PYTHON_LAYOUT.unpack(memory.raw)
    return memory if random.getstate()[1] == (*words, position) else None


# The position and words beside it: a draw moves the one, and when all words were used all of them change.
_MARK_SIZE = 16

_memory = _python_memory()
_mark = None if _memory is None else (ctypes.c_char * _MARK_SIZE).from_address(ctypes.addressof(_memory))
_attributes = vars(_generator)


def python_state() -> PythonState:
    """Where python's global generator is."""
    if _memory is None:
        return random.getstate(), None
    return _memory.raw, _attributes["gauss_next"]


def python_mark() -> PythonState:
    """What differs after a draw, in a few of the bytes."""
    return python_state() if _memory is None or _mark is None else (_mark.raw, _attributes["gauss_next"])


def set_python_state(state: PythonState) -> None:
    """Puts python's global generator to where `python_state` found it."""
    if _memory is None:
        random.setstate(state[0])
    else:
        _memory.raw, _attributes["gauss_next"] = state


def as_tuple(state: PythonState) -> Any:
    """What `random.getstate` gives for it."""
    if _memory is None:
        return state[0]
    position, *words = _PYTHON_LAYOUT.unpack(state[0])
    return random.getstate()[0], (*words, position), state[1]


def torch_bytes() -> bytes:
    """The state of torch's global CPU generator, to compare: `torch.equal` takes 5 us."""
    return torch.default_generator.get_state().numpy().tobytes()


def numpy_memory(bit_generator: Any) -> Any:
    """The memory of numpy's `MT19937`, as long as that lives; its `raw` are the bytes of its state."""
    return (ctypes.c_char * _NUMPY_SIZE).from_address(bit_generator.ctypes.state_address)


def numpy_mark(memory: Any) -> Any:
    """The part of what `numpy_memory` gave whose `raw` differs after a draw."""
    return (ctypes.c_char * _MARK_SIZE).from_address(ctypes.addressof(memory) + _NUMPY_SIZE - _MARK_SIZE)
