"""Seeding every generator, and keeping code that draws random numbers from disturbing training's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash

from dream_trainer.distributed.torch_compat import default_generator_of


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed from a run's seed and what it is for."""
    return xxhash.xxh3_64_intdigest("/".join(str(part) for part in parts).encode()) >> 1


def seed_everything(*parts: int | str) -> None:
    """Seeds python, numpy (if it is imported) and torch on all devices from `parts`."""
    seed = derived_seed(*parts)
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Puts back the global states of python, numpy and torch (CPU and `device`) when the block ends."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    generators = {torch.default_generator, default_generator_of(device)}
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for generator, state in states:
            generator.set_state(state)
