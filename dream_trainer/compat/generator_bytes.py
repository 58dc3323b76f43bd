"""The states of the global CPU generators of torch, python and numpy as bytes.

To save python's, `random.getstate` makes 625 numbers of it, and `numpy.random.get_state` an array and a dict: 12 and 42
microseconds, and 4 and 47 to put it back. torch's takes 1.3 each way, and 10 where other code ran in between. The bytes
behind them are read and written in 0.1, which makes it cheap enough to keep draws apart, and to see whether there were
any, at each batch.
"""

from __future__ import annotations

import _random
import ctypes
import random
import struct
import sys
from typing import Any

import torch
from torch import Tensor

PythonState = tuple[Any, Any]
"""The generator's bytes and the second of a pair of `random.gauss`; two states are equal if nothing was drawn."""

# What CPython's `_random.Random` holds behind the header of an object: the position and the words of its Mersenne
# Twister.
_PYTHON_LAYOUT = struct.Struct("=i624I")
# numpy's, behind the address that its `ctypes` interface gives: the words and the position.
_NUMPY_SIZE = struct.calcsize("=624Ii")
# torch's: the seed, how many words are left, whether it was seeded, the position, the words; and aligned to 8 bytes,
# each with a flag, the second of a pair of normal numbers in single and in double precision.
_TORCH_WORDS_AT, _TORCH_SIZE = struct.calcsize("=Qi?xxxI"), struct.calcsize("=Qi?xxxI624I4xf?xxxd?7x")
# What `Generator.get_state` gives begins with the same, the words as 64 bits each.
_TORCH_STATE = struct.Struct("=QiiQ624Q")

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


class _TorchState:
    """The state of torch's global CPU generator by its interface, with the same attribute as its memory has."""

    @property
    def raw(self) -> bytes:
        return torch.default_generator.get_state().numpy().tobytes()

    @raw.setter
    def raw(self, state: bytes) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _torch_memory(generator: torch.Generator, start: int) -> Any:
    return (ctypes.c_char * _TORCH_SIZE).from_address(_address(generator) + start)


def _address(generator: Any) -> int:
    address: int = generator._cdata
    return address


def _torch_start() -> int | None:
    """Where in a CPU generator its memory begins; None in a PyTorch that lays it out otherwise."""
    if "_cdata" not in vars(torch.Generator):
        return None
    generator = torch.Generator(device="cpu").manual_seed(7)
    words = struct.pack("=624I", *_TORCH_STATE.unpack_from(generator.get_state().numpy().tobytes())[4:])
    found = ctypes.string_at(_address(generator), _TORCH_SIZE + 80).find(words) - _TORCH_WORDS_AT
    if found < 0:
        return None
    for dtype in (torch.float32, torch.float64):  # each keeps the second of a pair
        torch.randn(1, generator=generator, dtype=dtype)
    memory, expected = _torch_memory(generator, found), generator.get_state()
    state = memory.raw
    generator.manual_seed(8)
    memory.raw = state
    return found if torch.equal(generator.get_state(), expected) else None


_start = _torch_start()
torch_state: Any = _TorchState() if _start is None else _torch_memory(torch.default_generator, _start)
"""Its `raw` are the bytes of torch's global CPU generator, which may be set, and which every draw changes."""


def as_tensor(state: bytes) -> Tensor:
    """What `torch.default_generator.get_state` gives for a `raw` of `torch_state`."""
    if _start is None:
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)
    generator = torch.Generator(device="cpu")
    _torch_memory(generator, _start).raw = state
    return generator.get_state()


def numpy_global(numpy: Any) -> Any:
    """The object behind numpy's global functions; its `_bit_generator` is what `get_bit_generator` gives, sooner."""
    return numpy.random.mtrand._rand


def numpy_memory(bit_generator: Any) -> Any:
    """The memory of numpy's `MT19937`, as long as that lives; its `raw` are the bytes of its state."""
    return (ctypes.c_char * _NUMPY_SIZE).from_address(bit_generator.ctypes.state_address)


def numpy_mark(memory: Any) -> Any:
    """The part of what `numpy_memory` gave whose `raw` differs after a draw."""
    return (ctypes.c_char * _MARK_SIZE).from_address(ctypes.addressof(memory) + _NUMPY_SIZE - _MARK_SIZE)
