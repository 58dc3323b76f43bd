"""Seeds, and the process's random generators: python's, numpy's and torch's.

Every stream has its own seed, hashed from the run's seed and its purpose, whatever the world size and earlier draws."""

from __future__ import annotations

import random
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
    hashed = purpose
    for number in numbers:
        hashed += (number & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(hashed)


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


def _bits(generator: np.random.MT19937) -> tuple[int, int]:
    return generator.random_raw(), generator.random_raw()  # an array of two takes three times as long


# Where a generator is: torch's state, and the next 64 bits of the others, whose states take ten times longer to read.
_MARKS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.default_generator.get_state().numpy().tobytes(),
    "python": lambda: random.getrandbits(64),
    "numpy": lambda: _bits(_numpy.random.get_bit_generator()),
}


class WatchedSeeds:
    """Seeds the global CPU generators, and detects which of them were drawn from, once."""

    def __init__(self, seed: int) -> None:
        seed_cpu(seed)
        self._marks = {name: mark() for name, mark in _MARKS.items()}
        seed_cpu(seed, ("python", "numpy"))

    def drawn(self) -> set[str]:
        """Which generators were drawn from or seeded since; draws from most."""
        return {name for name, mark in self._marks.items() if _MARKS[name]() != mark}


class _Outside:
    """The training process's own streams while others are in use; the outermost block restores them."""

    # Of torch, of python, and numpy's generator, which was taken out: copying takes 45 us.
    states: tuple[Tensor, Any, Any] | None = None
    depth = 0  # number of blocks around

    def __init__(self) -> None:
        # A copy of python's state takes 30 us. The last one still holds if the next 64 bits are those that follow it.
        self.copied: tuple[Any, ...] = ()
        self.follows: int | None = None
        self.looked: list[int] = []  # 64 bits that were drawn to see this, until training's streams are set aside

    def look(self) -> None:
        if not self.looked:
            self.looked.extend(map(random.getrandbits, (64,)))  # one call: no signal is handled between the two

    def of_python(self) -> tuple[Any, ...]:
        """Python's state before the look at it, if there is one."""
        if not self.looked:
            return random.getstate()
        (bits,) = self.looked
        if bits != self.follows or _python.gauss_next != self.copied[-1]:
            version, (*words, place), gauss = random.getstate()
            if place == 1:  # the look drew the last of 624 words and the first of those that replaced them
                words, place = [_untempered(bits & 0xFFFF_FFFF), *words[:-1]], 2
            self.copied, self.follows = (version, (*words, place - 2), gauss), bits
        return self.copied


def _untempered(output: int) -> int:
    """The word of MT19937's state that gave `output` (Matsumoto and Nishimura, 1998)."""
    last = output ^ output >> 18
    last ^= last << 15 & 0xEFC6_0000
    third = last
    for _ in range(4):
        third = last ^ third << 7 & 0x9D2C_5680
    return third ^ third >> 11 ^ third >> 22


_python: Any = random.random.__self__  # type: ignore[attr-defined]  # the generator that the functions belong to
_outside = _Outside()
# numpy's generators inside these blocks, by the number of blocks around.
_stand_ins: list[Any] = []


def undisturbed_cpu_state() -> tuple[Tensor, Any, Any]:
    """The states of torch's, python's and numpy's generators as they are outside `preserved_random_state`."""
    if _outside.states is None:
        return torch.default_generator.get_state(), _outside.of_python(), np.random.get_state(legacy=False)
    of_torch, of_python, numpy_generator = _outside.states
    # A generator that was taken out has lost the second half of a pair of normal numbers, if it held one.
    return of_torch, of_python, numpy_generator.state | {"has_gauss": 0, "gauss": 0.0}


class preserved_random_state(AbstractContextManager[None]):
    """Restores the global generators when the block ends (20 us), except half a pair of numpy's legacy `randn`."""

    __slots__ = ("_depth", "_device_state", "_is_outermost", "_numpy", "_on_device", "_state")

    _state: Any  # of the three generators; None until they are set aside

    def __init__(self, device: torch.device | None = None, numpy_inside: Any = None) -> None:
        self._on_device = None if device is None or device.type == "cpu" else default_generator_of(device)
        self._numpy = numpy_inside  # instead of that for the number of blocks around

    def __enter__(self) -> None:
        self._is_outermost, self._depth = _outside.states is None, _outside.depth
        if len(_stand_ins) <= self._depth:
            _stand_ins.append(np.random.MT19937(len(_stand_ins)))
        of_torch, of_numpy = torch.default_generator.get_state(), _numpy.random.get_bit_generator()
        self._device_state = None if self._on_device is None else self._on_device.get_state()
        self._state = None
        try:
            if self._is_outermost:
                _outside.look()
            self._state = of_torch, _outside.of_python(), of_numpy
            if self._is_outermost:
                _outside.states = self._state
                _outside.looked.clear()
            _numpy.random.set_bit_generator(self._numpy or _stand_ins[self._depth])
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
                _outside.looked.clear()
                _outside.states = None  # not before: a signal that asks for a save may come just here too

    def _put_back(self) -> None:
        if self._state is None:  # training's streams are not set aside yet
            random.setstate(_outside.of_python())
            return
        of_torch, of_python, numpy_generator = self._state
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        _numpy.random.set_bit_generator(numpy_generator)
        if self._on_device is not None and self._device_state is not None:
            self._on_device.set_state(self._device_state)


class watched_random_state(preserved_random_state):
    """Also detects which generators are drawn from inside. They are not seeded: what draws has to run again, seeded."""

    __slots__ = ("_alike", "_following", "_python", "_turn", "is_inside")

    def __init__(self) -> None:
        super().__init__(numpy_inside=np.random.MT19937(0))
        self._alike = np.random.MT19937(0)  # to compare with
        self._python: Any = None  # the state that `_following` is of
        self.is_inside = False

    def __enter__(self) -> None:
        super().__enter__()
        self.is_inside = True
        try:
            self._turn = int(self._is_outermost)  # the first bits that follow were looked at already
            of_python = self._state[1]
            if of_python is not self._python:
                copied = random.Random()
                copied.setstate(of_python)
                self._following = [copied.getrandbits(64) for _ in range(64)]
                self._python = of_python
        except BaseException:  # a signal, as above
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        self.is_inside = False
        super().__exit__()

    def begin_again(self) -> None:
        """Forgets what was drawn and seeded so far."""
        self.__exit__()
        self._numpy.state = self._alike.state
        self.__enter__()

    def drawn(self, generators: Collection[str]) -> set[str]:
        """Which of `generators` were drawn from or seeded inside, if no look before has found so; draws from most."""
        found = set()
        if "torch" in generators and _MARKS["torch"]() != self._state[0].numpy().tobytes():
            found.add("torch")
        if "python" in generators:
            bits, expected = random.getrandbits(64), self._following[self._turn]
            if bits != expected or _python.gauss_next != self._python[-1]:
                found.add("python")
            self._turn += 1
            if self._turn == len(self._following):
                random.setstate(self._python)
                self._turn = 0
        if "numpy" in generators and self._numpy.random_raw() != self._alike.random_raw():
            found.add("numpy")
        return found


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
