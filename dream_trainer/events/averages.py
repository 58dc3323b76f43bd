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
    """A callback whose averages can stand in for the weights: an interface."""

    export_name: ClassVar[str] = ""
    sees_shards: ClassVar[bool] = True

    @abstractmethod
    def averaged(self, model_name: str) -> dict[str, Tensor]:
        """The averages of one model by parameter name."""

    @abstractmethod
    def averaged_weights(self) -> AbstractContextManager[None]:
        """Inside, the averaged models hold their averages. Called by every rank."""


def averages_to_export(callbacks: Iterable[Callback], weights: str, model: str) -> AbstractContextManager[None]:
    """Inside, `model` has the averages called `weights`, such as "ema", instead of its own."""
    callback_of_name: dict[str, AveragingCallback] = {}
    counts: Counter[str] = Counter()
    averaging = [callback for callback in callbacks if isinstance(callback, AveragingCallback) and callback.export_name]
    for callback in sorted(averaging, key=lambda callback: callback.export_name):
        name = callback.export_name
        callback_of_name.setdefault(name, callback)
        callback_of_name[f"{name}.{counts[name]}"] = callback
        counts[name] += 1
    if weights not in callback_of_name:
        raise CheckpointError(
            f'weights={weights!r} is not understood: use "model", or the average of an EMA or SWA callback, of which '
            f"the trainer has {list(callback_of_name) or 'none'}."
        )
    callback_of_name[weights].averaged(model)  # raises where it averages others only
    return callback_of_name[weights].averaged_weights()
