"""Seeds, and the process's random generators: python's, numpy's and torch's.

Every stream of random numbers has a seed of its own, hashed from the run's seed and what it is for, so that none
depends on the world size or on what was drawn before.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor

from dream_trainer.compat.pytorch import default_generator_of


def hash_seed(purpose: bytes, *numbers: int) -> int:
    """A 64-bit seed that is unrelated to that of any other purpose or numbers.

    Args:
        purpose: Keeps apart seeds of different uses with the same numbers.
        *numbers: Integers of any sign; only the lowest 64 bits of each count.
    """
    words = [number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers]
    return xxhash.xxh3_64_intdigest(purpose + struct.pack(f"<{len(words)}Q", *words))


def seed_cpu(seed: int) -> None:
    """Seeds the global CPU generators of torch, `random` and, if this process imported it, numpy.

    Args:
        seed: 64 bits. torch and numpy run the same generator from 32 bits of it, so each gets its own half.
    """
    # torch.manual_seed takes 87 us, because it seeds every device, and keeps each seed with a stack of calls for those
    # that are not in use yet.
    torch.default_generator.manual_seed(seed & 0xFFFF_FFFF)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed >> 32)


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds the global CPU generators and the one of `device`, and no other device's."""
    seed_cpu(seed)
    if device.type != "cpu":
        default_generator_of(device).manual_seed(seed & 0xFFFF_FFFF)


def seed_everything(seed: int) -> None:
    """Seeds all global generators, those of devices too."""
    torch.manual_seed(seed & 0xFFFF_FFFF)
    seed_cpu(seed)


# What the outermost of the blocks below puts back: the training process's own streams, while others are drawn from.
# numpy's is a generator that was taken out, since copying its state in and out takes 85 us.
_preserved: tuple[Tensor, Any, Any] | None = None
# numpy's generators inside these blocks, one for each block around another.
_stand_ins: list[Any] = []
_depth = 0


def undisturbed_cpu_state() -> tuple[Tensor, Any, Any]:
    """The states of torch's, python's and numpy's global generators as they are outside `preserved_random_state`.

    A checkpoint may be asked for while data is loaded, which draws from streams of its own.
    """
    if _preserved is None:
        return _cpu_state()
    torch_state, python_state, numpy_generator = _preserved
    # A generator that was taken out has lost the second half of a pair of normal numbers, if it held one.
    return (
        torch_state,
        python_state,
        None if numpy_generator is None else numpy_generator.state | {"has_gauss": 0, "gauss": 0.0},
    )


def _cpu_state() -> tuple[Tensor, Any, Any]:
    numpy = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(legacy=False),
    )


@contextmanager
def preserved_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Puts the global generators back to where they were when the block ends (about 15 us).

    Seed them inside: numpy's begins with any state. Of numpy's legacy `randn`, which draws numbers in pairs, the second
    of a pair is not kept over the block.

    Args:
        device: Whose generator to put back beside the CPU's; None for the CPU alone.
    """
    global _preserved, _depth
    numpy = sys.modules.get("numpy")
    numpy_generator = None if numpy is None else numpy.random.get_bit_generator()
    if len(_stand_ins) == _depth and numpy is not None:
        _stand_ins.append(numpy.random.MT19937(_depth))
    state = torch.default_generator.get_state(), random.getstate(), numpy_generator
    is_outermost, depth = _preserved is None, _depth
    on_device = None if device is None or device.type == "cpu" else default_generator_of(device)
    device_state = None if on_device is None else on_device.get_state()

    def put_back() -> None:
        torch.default_generator.set_state(state[0])
        random.setstate(state[1])
        if numpy is not None:
            numpy.random.set_bit_generator(numpy_generator)
        if on_device is not None and device_state is not None:
            on_device.set_state(device_state)

    try:
        if is_outermost:
            _preserved = state
        if numpy is not None:
            numpy.random.set_bit_generator(_stand_ins[depth])
        _depth = depth + 1
        yield
    finally:
        try:
            put_back()
        except BaseException:  # a signal that ends a wait for data may come just here, once
            put_back()
            raise
        finally:
            _depth = depth
            if is_outermost:
                _preserved = None  # not before: a signal that asks for a save may come just here too


@contextmanager
def noticing_draws() -> Iterator[list[bool]]:
    """After the block, the list that it yields holds whether a global CPU generator moved inside (about 80 us)."""
    noticed: list[bool] = []
    torch_before, python_before, numpy_before = _cpu_state()
    yield noticed
    torch_after, python_after, numpy_after = _cpu_state()
    moved = python_before != python_after or not torch.equal(torch_before, torch_after)
    if numpy_after is not None:
        # A draw moves the position; only 624 of them at once come back to it.
        moved |= numpy_before is None or numpy_before["state"]["pos"] != numpy_after["state"]["pos"]
    noticed.append(moved)
