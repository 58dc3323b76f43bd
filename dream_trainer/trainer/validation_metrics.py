"""ValidationMetrics: torchmetrics' objects in a validation, and those of training left as they are.

A metric that some rank has updated between two validations is training's: neither reset nor computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import HookError
from dream_trainer.modules.metrics import MetricStates, computed, updates


@dataclass(eq=False)
class ValidationMetrics:
    metrics: Callable[[], dict[str, Any]]
    also_private: Callable[[], list[Any]]
    world: Ranks
    say_once: Callable[[str, str], None]

    # How often this rank has updated each metric by the end of the last validation.
    _updates: dict[str, int] = field(default_factory=dict)
    # Those that some rank has ever updated between, so that they are training's; as they were when this validation
    # began. For good, since one that is reset in post_epoch may be updated as often again.
    _of_training: dict[str, int] = field(default_factory=dict)

    def _counts(self) -> dict[str, int]:
        return {name: updates(metric) for name, metric in self.metrics().items()}

    @contextmanager
    def validation(self) -> Iterator[None]:
        counts = self._counts()
        updated_here = {name for name, count in counts.items() if count not in (0, self._updates.get(name, 0))}
        updated = set().union(*self.world.all_gather_object(updated_here)) if counts else set()
        updated |= self._of_training.keys() & counts.keys()
        self._of_training = {name: counts[name] for name in updated}
        try:
            yield
        finally:
            self._updates = self._counts()

    def only_of_training(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `metrics` that training has updated, before the last validation or since."""
        counts = self._counts()
        return {
            name: metric
            for name, metric in metrics.items()
            if name in self._of_training or counts[name] != self._updates.get(name, 0)
        }

    def start_loader(self) -> None:
        for name, metric in self.metrics().items():
            if name not in self._of_training:
                metric.reset()

    @contextmanager
    def padding(self) -> Iterator[None]:
        """A padding batch counts for nothing: metrics are as before at the end."""
        states = MetricStates(self.also_private())
        try:
            yield
        finally:
            states.put_back()

    def values(self) -> list[tuple[str, float]]:
        """Values of the metrics over all ranks since `start_loader`, with their names; a collective."""
        numbers: list[tuple[str, float]] = []
        for name, metric in self.metrics().items():
            if name in self._of_training:
                if any(self.world.all_gather_object(updates(metric) != self._of_training[name])):
                    raise HookError(
                        f"metric {name!r} is updated in training and in validation, so that neither's value would be "
                        "its own. Give each its own metric."
                    )
                continue
            for key, item in computed(name, metric, self.world).items():
                shape = tuple(torch.as_tensor(item).shape)
                if math.prod(shape) == 1:
                    numbers.append((key, float(item)))
                else:
                    self.say_once(
                        f"metric {key}",
                        f"metric {key!r} computes a tensor of shape {shape}, which is not logged: only single numbers "
                        "are. Log what you want of it in post_val_epoch, or have it computed as one number.",
                    )
        return numbers
