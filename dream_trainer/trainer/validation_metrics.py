"""ValidationMetrics: torchmetrics' objects in a validation, and those of training left as they are.

A metric that some rank has updated between two validations is training's: neither reset nor computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import HookError
from dream_trainer.modules.metrics import computed, copied, is_metric, updates


@dataclass(eq=False)
class ValidationMetrics:
    metrics: Callable[[], dict[str, Any]]
    attributes: dict[str, Any]
    world: Ranks
    say_once: Callable[[str, str], None]

    def __post_init__(self) -> None:
        # How often this rank has updated each metric by the end of the last validation.
        self._updates: dict[str, int] = {}
        # Those that some rank has ever updated between, so that they are training's; as they were when this validation
        # began. For good, since one that is reset in post_epoch may be updated as often again.
        self._of_training: dict[str, int] = {}

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
        """Metrics see copies of themselves inside, so that a padding batch counts for nothing."""
        originals = {name: value for name, value in self.attributes.items() if _holds_metric(value)}
        try:
            self.attributes.update(copied(originals, self.metrics().values()))
            yield
        finally:
            self.attributes.update(originals)

    def values(self) -> dict[str, float]:
        """Values of the metrics over all ranks since `start_loader`; a collective."""
        numbers: dict[str, float] = {}
        seen: set[str] = set()
        for name, metric in self.metrics().items():
            if name in self._of_training:
                if any(self.world.all_gather_object(updates(metric) != self._of_training[name])):
                    raise HookError(
                        f"metric {name!r} is updated in training and in validation, so that neither's value would be "
                        "its own. Give each its own metric."
                    )
                continue
            values = computed(name, metric, self.world)
            for key in seen.intersection(values):
                self.say_once(
                    f"metrics {key}",
                    f"two metrics are called {key!r}, and only the one assigned later is logged. Give each collection "
                    "a different prefix.",
                )
            seen.update(values)
            for key, item in values.items():
                shape = tuple(torch.as_tensor(item).shape)
                if math.prod(shape) == 1:
                    numbers[key] = float(item)
                else:
                    self.say_once(
                        f"metric {key}",
                        f"metric {key!r} computes a tensor of shape {shape}, which is not logged: only single numbers "
                        "are. Log what you want of it in post_val_epoch, or have it computed as one number.",
                    )
        return numbers


def _holds_metric(value: Any) -> bool:
    if is_metric(value):
        return True
    if isinstance(value, list | tuple | nn.ModuleList):
        return any(is_metric(item) for item in value)
    return isinstance(value, Mapping | nn.ModuleDict) and any(is_metric(item) for item in value.values())
