"""Callbacks that keep averages of the weights, as exports see them: by a name."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import ClassVar

from torch import Tensor

from dream_trainer.errors import CheckpointError
from dream_trainer.events.callback import Callback


class AveragingCallback(Callback):
    """A callback whose averages can stand in for the weights: an interface.

    Attributes:
        export_name: What `trainer.export(weights=...)` calls them; "" if they cannot be exported.
    """

    export_name: ClassVar[str] = ""

    @abstractmethod
    def averaged(self, model_name: str) -> dict[str, Tensor]:
        """The averages of one model by parameter name.

        Raises:
            KeyError: No model of that name is averaged.
        """

    @abstractmethod
    def averaged_weights(self) -> AbstractContextManager[None]:
        """Inside, the averaged models hold their averages. Called by every rank."""


def averages_to_export(callbacks: Iterable[Callback], weights: str, model: str) -> AbstractContextManager[None]:
    """Inside, `model` holds the averages that are called `weights`, such as "ema", or "ema.1" for the second of them.

    Raises:
        CheckpointError: No callback has averages of that name.
        KeyError: It averages other models only.
    """
    found: dict[str, AveragingCallback] = {}
    counts: Counter[str] = Counter()
    averaging = [callback for callback in callbacks if isinstance(callback, AveragingCallback) and callback.export_name]
    for callback in sorted(averaging, key=lambda callback: callback.export_name):
        name = callback.export_name
        found.setdefault(name, callback)
        found[f"{name}.{counts[name]}"] = callback
        counts[name] += 1
    if weights not in found:
        raise CheckpointError(
            f'weights={weights!r} is not understood: use "model", or the average of an EMA or SWA callback, of which '
            f"the trainer has {list(found) or 'none'}."
        )
    found[weights].averaged(model)  # raises where it averages others only
    return found[weights].averaged_weights()
