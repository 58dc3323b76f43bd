"""NoRounds: all ranks step together, so there is one model at any time. LocalSGDMixin puts Rounds in its place."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor


class NoRounds:
    """What is asked where ranks might have weights of their own.

    Attributes:
        steps: Optimizer steps of a round.
    """

    steps = 1

    def as_one_model(self) -> AbstractContextManager[None]:
        """Wraps what speaks of the run's model, such as an export: inside, all ranks have its weights; a collective."""
        return nullcontext()

    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint has of `tensors`, those of models and optimizers by name, and beside them; a collective."""
        return tensors

    def tensors_to_load(self, tensors: dict[str, Tensor], saved: Collection[str], *, is_own: bool) -> dict[str, Tensor]:
        """Where a checkpoint with the names `saved` is loaded to; it `is_own` unless this run begins from another's."""
        return tensors
