"""torchmetrics' objects over ranks: computed from the samples of all, whichever of them a rank has seen. Their own
exchange hangs, or ends the process, if ranks have updated a metric unequally often."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import HookError


def is_metric(value: Any) -> bool:
    """Whether `value` is a torchmetrics object, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric | torchmetrics.MetricCollection)


def parts(metric: Any) -> list[Any]:
    """The metrics in a metric or collection, wrapped ones too; of a single one itself."""
    return [part for part in metric.modules() if isinstance(part, sys.modules["torchmetrics"].Metric)]


def updates(metric: Any) -> int:
    """How often this rank has updated a metric, or the members of a collection, since their reset."""
    wrappers = sys.modules["torchmetrics"].wrappers
    of_parts = parts(metric)
    of_running = sum(part._num_vals_seen for part in of_parts if isinstance(part, wrappers.Running))
    own = (part.update_count for part in of_parts if not isinstance(part, wrappers.abstract.WrapperMetric))
    return int(sum(own, of_running))


def copied(tree: Any, metrics: Iterable[Any]) -> Any:
    """A deep copy of `tree`, which contains `metrics` or their states; process groups are shared, as they must be."""
    groups = (part.process_group for metric in metrics for part in parts(metric))
    return copy.deepcopy(tree, {id(group): group for group in groups if group is not None})


class MetricStates:
    """The present states of metrics and collections, to be restored into the same objects."""

    def __init__(self, metrics: Sequence[Any]) -> None:
        self._metrics = metrics
        self._owners = [module for metric in metrics for module in metric.modules() if is_metric(module)]
        self._states = copied([_attributes(module) for module in self._owners], metrics)

    def put_back(self) -> None:
        for module, attributes in zip(self._owners, copied(self._states, self._metrics), strict=True):
            vars(module).update(attributes)


def _attributes(module: Any) -> dict[str, Any]:
    """All but modules within it, and but `update` and `compute`, which torchmetrics binds to each object."""
    of_object = dict(module.__getstate__() or {})
    of_object.pop("_modules", None)
    return of_object


def computed(name: str, metric: Any, world: Ranks) -> dict[str, Any]:
    """Named results of a metric or collection over the samples of all ranks. Every rank must call it."""
    if not any(world.all_gather_object(updates(metric) > 0)):
        return {}
    own = [part for part in parts(metric) if part.dist_sync_fn is None]
    with _exchanged(own, world) if world.world_size > 1 else nullcontext():
        value = metric.compute()
    return dict(value) if isinstance(value, Mapping) else {name: value}


def higher_is_better(metrics: Mapping[str, Any], name: str) -> bool | None:
    """`higher_is_better` of the metric behind a validation's value; None without a metric, or if it is not set."""
    for own, metric in metrics.items():
        collection = sys.modules["torchmetrics"].MetricCollection
        members = metric.items() if isinstance(metric, collection) else [(own, metric)]
        for key, member in members:
            if name == key or name.endswith(f"/{key}"):
                known: bool | None = member.higher_is_better
                return known
    return None


@contextmanager
def _exchanged(metrics: Sequence[Any], world: Ranks) -> Iterator[None]:
    """Inside, the metrics exchange their states in our way, with lists filled up to equal lengths."""
    lists = [
        {key: state for key, state in metric.metric_state.items() if isinstance(state, list)} for metric in metrics
    ]
    ranks = world.all_gather_object([{key: _described(state) for key, state in states.items()} for states in lists])
    fillers: list[Tensor] = []

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        counts = world.counts_data and not any(tensor is filler for filler in fillers)
        gathered = world.all_gather_object(tensor.detach().cpu() if counts else None)
        return [other.to(tensor.device) for other in gathered if other is not None]

    try:
        for index, (metric, states) in enumerate(zip(metrics, lists, strict=True)):
            metric.dist_sync_fn = gather
            for key, state in states.items():
                described = [rank[index][key] for rank in ranks]
                lacking = max(length for length, _ in described) - len(state)
                example = next((filler for _, filler in described if filler is not None), None)
                if lacking and example is not None:
                    filler = example.to(metric.device)
                    fillers.append(filler)
                    setattr(metric, key, [*state, *[filler] * lacking])
        yield
    finally:
        for metric, states in zip(metrics, lists, strict=True):
            metric.dist_sync_fn = None
            for key, state in states.items():
                setattr(metric, key, state)


def _described(state: list[Any]) -> tuple[int, Tensor | None]:
    """Its length, and what fills it up: no rows, which fit the others if a metric joins its own entries first."""
    first = state[0] if state else None
    return len(state), torch.empty(0, *first.shape[1:], dtype=first.dtype) if isinstance(first, Tensor) else None


@dataclass(eq=False)
class ValidationMetrics:
    """The trainer's metrics in validations, but those that some rank has updated between two: they are training's."""

    metrics: Callable[[], dict[str, Any]]
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
