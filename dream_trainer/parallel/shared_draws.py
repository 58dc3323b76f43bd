"""Random numbers in a context-parallel step: equal on context-parallel ranks, unless they are per-position.

The shape of the drawn tensor decides. Python's generator is equal on these ranks and torch's are not, so a torch
operation with equal draws is seeded by a number from Python's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_cpu, seed_device
from dream_trainer.errors import StepError
from dream_trainer.modules.recompute import is_recomputed_by_others
from dream_trainer.nested import leaves

_NAMES = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial "
    "uniform exponential random cauchy geometric log_normal dropout alpha_dropout native_dropout rrelu "
    "rrelu_with_noise gumbel_softmax standard_gamma sample_dirichlet kaiming_uniform "
    "fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d "
    "fractional_max_pool3d_with_indices".split()
)
"""PyTorch's functions that draw from the default generators, without the underscores around their names."""
_OF_CHANNELS = frozenset("dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout".split())
"""Those that draw for each pair of the first two dimensions: a sample and a channel."""


def seed_for_sequence(seed: int) -> None:
    """Seeds the generators that are equal on context-parallel ranks: Python's and numpy's global ones (8 us)."""
    seed_cpu(seed, ("python", "numpy"))


@contextmanager
def numbers_of_place(purpose: bytes, place: int, device: torch.device) -> Iterator[None]:
    """Inside, ranks at different places of a mesh's dimension draw different numbers; outside, they stay equal."""
    own = int(torch.randint(2**62, (), device="cpu", generator=torch.default_generator))
    shared = random.getrandbits(62)
    with preserved_random_state(device):
        seed_device(hash_seed(purpose, own, place), device)
        seed_for_sequence(hash_seed(purpose, shared, place))
        yield


def is_draw(name: str) -> bool:
    return name in _NAMES or name in _OF_CHANNELS


class PartShapes:
    """Tells by their shapes which tensors of a step have positions."""

    def __init__(self) -> None:
        self.rows = 1  # samples in the running batch
        self.lengths: set[int] = set()  # this rank's positions, and those of sequence parallelism's pieces
        self.given: list[tuple[Tensor, int | None]] = []  # the step's tensors, and the dimension of the cut, if any

    def begin(self) -> None:
        self.rows, self.lengths, self.given = 1, set(), []

    def add(self, part: Tensor, dim: int, *lengths: int) -> None:
        self.rows = max(self.rows, part.shape[0] if dim % part.ndim else 1)
        self.lengths.update(lengths)
        self.given.append((part, dim % part.ndim))

    def end(self, batch: Any) -> None:
        """The step gets `batch`; all its other tensors are whole."""
        self.given += [(leaf, None) for leaf in leaves(batch) if isinstance(leaf, Tensor)]

    def have_positions(self, shape: torch.Size) -> bool:
        """Whether there is a dimension of positions, by itself or along with the batch."""
        if not self.lengths.isdisjoint(shape[1:]):
            return True
        if not shape or shape[0] == 0 or self.rows % shape[0] == 0:  # samples of a batch, or of a micro-batch
            return False
        counts = (divmod(shape[0], length) for length in self.lengths)
        return any(rest == 0 and self.rows % samples == 0 for samples, rest in counts)


class RandomFunction:
    """A random function, with equal draws on context-parallel ranks unless they are per-position."""

    def __init__(self, function: Callable[..., Any], name: str, shapes: PartShapes) -> None:
        self.function, self._name, self._shapes = function, name, shapes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator") is not None:
            return self.function(*args, **kwargs)
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if given and self._is_of_part(given):
            return self.function(*args, **kwargs)
        if not given:  # a new tensor shows its shape, and may be made again
            given = [self.function(*args, **kwargs)]
            if self._is_of_part(given):
                return given[0]
        if is_recomputed_by_others():
            raise StepError(_IN_CHECKPOINT.format(self._name))
        device = torch.device("cpu") if given[0].is_meta else given[0].device
        seed = random.getrandbits(64)
        with preserved_random_state(device):
            seed_device(seed, device)
            return self.function(*args, **kwargs)

    def refuse_in_graph(self, drawn: Any, *args: Any, **kwargs: Any) -> None:
        """Refuses a draw for all ranks in a compiled block: there, each rank draws for its part."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)] or [drawn]
        if kwargs.get("generator") is None and not self._is_of_part(given):
            raise StepError(_IN_GRAPH.format(self._name, tuple(given[0].shape)))

    def _is_of_part(self, given: list[Tensor]) -> bool:
        """Whether each rank draws different numbers."""
        drawn_for = slice(2) if self._name in _OF_CHANNELS else slice(None)
        if self._name == "multinomial":  # whose last dimension holds what is drawn from
            drawn_for = slice(-1)
        shapes = (value.shape[drawn_for] for value in given if not isinstance(value, Parameter))
        return any(map(self._shapes.have_positions, shapes))


_IN_CHECKPOINT = (
    "{} draws random numbers that are of no positions, and so alike on ranks that share sequences, inside "
    "torch.utils.checkpoint or a torch.autograd.Function: in backward each rank would draw others. Under "
    'context_parallel set device_parameters.activation_checkpointing to "full" or "selective" instead, or draw outside '
    "of it."
)
_IN_GRAPH = (
    "{} of the shape {} within a compiled block draws random numbers that are not per-position, so all "
    "context-parallel ranks must draw the same ones; in a graph they do not. Under context_parallel draw before the "
    "block and pass the numbers to it, or use compile=False."
)
