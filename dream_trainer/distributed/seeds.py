"""Seeds, and the process's random generators: python's, numpy's and torch's.

Every stream has its own seed, hashed from the run's seed and its purpose, whatever the world size and earlier draws."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from dream_trainer.compat.pytorch import default_generator_of
from dream_trainer.errors import CheckpointError

_numpy: Any = np  # its stubs do not export get_bit_generator and set_bit_generator
_PREFIX = "random."  # of the names of states in a checkpoint
GENERATORS = frozenset(("torch", "python", "numpy"))  # the global CPU generators, by library


def hash_seed(purpose: bytes, *numbers: int) -> int:
    """A 64-bit seed that is unrelated to that of any other purpose or numbers."""
    words = [number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers]
    return xxhash.xxh3_64_intdigest(purpose + struct.pack(f"<{len(words)}Q", *words))


def seed_cpu(seed: int, generators: Collection[str] = GENERATORS) -> None:
    """Seeds the global CPU generators of torch (1 us), python (6 us) and numpy (2 us)."""
    if "torch" in generators:
        # torch.manual_seed takes 87 us, because it seeds every device, and keeps each seed with a stack of calls for
        # those that are not in use yet.
        torch.default_generator.manual_seed(seed & 0xFFFF_FFFF)
    if "python" in generators:
        random.seed(seed)
    if "numpy" in generators:
        np.random.seed(seed >> 32)


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds the global CPU generators and the one of `device`, and no other device's."""
    seed_cpu(seed)
    if device.type != "cpu":
        default_generator_of(device).manual_seed(seed & 0xFFFF_FFFF)


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed & 0xFFFF_FFFF)
    seed_cpu(seed)


# Where a generator is: torch's state, and the next 128 bits of the others, whose states take ten times longer to read.
_MARKS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.default_generator.get_state().numpy().tobytes(),
    "python": lambda: random.getrandbits(128),
    "numpy": lambda: _numpy.random.get_bit_generator().random_raw(4).tobytes(),
}


class WatchedSeeds:
    """Seeds the global CPU generators, and detects, up to `looks` times, which were drawn from."""

    def __init__(self, seed: int, looks: int = 1) -> None:
        self._seed = seed
        seed_cpu(seed)
        self._marks = [{name: mark() for name, mark in _MARKS.items()} for _ in range(looks)][::-1]
        self.seed(("python", "numpy"))

    def seed(self, generators: Collection[str]) -> None:
        seed_cpu(self._seed, generators)
        self.looks = self._marks.copy()  # the marks of those to come, the next one last

    def drawn(self, generators: Collection[str] = GENERATORS) -> set[str]:
        """Which of `generators` were drawn from or seeded since the last look; draws from most."""
        marks = self.looks.pop()
        return {name for name in generators if _MARKS[name]() != marks[name]}


class _Outside:
    """The training process's own streams while others are in use; the outermost block restores them."""

    # Of torch, of python, and numpy's generator, which was taken out: copying takes 45 us.
    states: tuple[Tensor, Any, Any] | None = None
    depth = 0  # number of blocks around


_outside = _Outside()
# numpy's generators inside these blocks, by the number of blocks around.
_stand_ins: list[Any] = []


def undisturbed_cpu_state() -> tuple[Tensor, Any, Any]:
    """The states of torch's, python's and numpy's generators as they are outside `preserved_random_state`."""
    if _outside.states is None:
        return torch.default_generator.get_state(), random.getstate(), np.random.get_state(legacy=False)
    of_torch, of_python, numpy_generator = _outside.states
    # A generator that was taken out has lost the second half of a pair of normal numbers, if it held one.
    return of_torch, of_python, numpy_generator.state | {"has_gauss": 0, "gauss": 0.0}


class preserved_random_state(AbstractContextManager[None]):
    """Restores the global generators when the block ends (20 us), except half a pair of numpy's legacy `randn`."""

    __slots__ = ("_depth", "_device_state", "_is_outermost", "_on_device", "_state")

    def __init__(self, device: torch.device | None = None) -> None:
        self._on_device = None if device is None or device.type == "cpu" else default_generator_of(device)

    def __enter__(self) -> None:
        self._is_outermost, self._depth = _outside.states is None, _outside.depth
        if len(_stand_ins) <= self._depth:
            _stand_ins.append(np.random.MT19937(len(_stand_ins)))
        self._state = state = torch.default_generator.get_state(), random.getstate(), _numpy.random.get_bit_generator()
        self._device_state = None if self._on_device is None else self._on_device.get_state()
        try:
            if self._is_outermost:
                _outside.states = state
            _numpy.random.set_bit_generator(_stand_ins[self._depth])
            _outside.depth += 1
        except BaseException:  # a signal that ends a wait for data may come just here
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        try:
            self._put_back()
        except BaseException:  # or here, once
            self._put_back()
            raise
        finally:
            _outside.depth = self._depth
            if self._is_outermost:
                _outside.states = None  # not before: a signal that asks for a save may come just here too

    def _put_back(self) -> None:
        of_torch, of_python, numpy_generator = self._state
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        _numpy.random.set_bit_generator(numpy_generator)
        if self._on_device is not None and self._device_state is not None:
            self._on_device.set_state(self._device_state)


@contextmanager
def numbers_of_place(purpose: bytes, place: int, device: torch.device) -> Iterator[None]:
    """Inside, ranks at different places of a mesh's dimension draw different numbers; outside, they stay equal."""
    shared = int(torch.randint(2**62, (), device="cpu", generator=torch.default_generator))
    with preserved_random_state(device):
        seed_device(hash_seed(purpose, shared, place), device)
        yield


def random_state(device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The global generators' states for typed JSON, and as named byte tensors, read without drawing."""
    torch_state, python_state, numpy_state = undisturbed_cpu_state()
    tensors = {f"{_PREFIX}{kind}": generator.get_state() for kind, generator in _generators(device).items()}
    return {"python": python_state, "numpy": numpy_state}, tensors | {f"{_PREFIX}cpu": torch_state}


def set_random_state(state: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores the result of `random_state`, or raises if it is of another kind of device."""
    generators = _generators(device)
    saved = {name.removeprefix(_PREFIX) for name in tensors if name.startswith(_PREFIX)}
    if saved != set(generators):
        raise CheckpointError(
            f"The random states are of {sorted(saved)}, and this rank draws on {sorted(generators)}. "
            "Resume on the same kind of device, or reseed."
        )
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    for kind, generator in generators.items():
        generator.set_state(tensors[f"{_PREFIX}{kind}"].cpu())


def _generators(device: torch.device) -> dict[str, torch.Generator]:
    return {kind.type: default_generator_of(kind) for kind in (torch.device("cpu"), device)}
