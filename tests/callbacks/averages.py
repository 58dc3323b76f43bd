"""What the tests of EMA, SWA and WeightTransfer share: trainers, and the weights and averages of a loop by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.api import CheckpointParameters, DistributedDataLoader
from tests.trainer import small
from tests.trainer.arithmetic import full

Windows = Sequence[Sequence[small.Batch]]
Weights = dict[str, Tensor]


def in_windows(data: Sequence[small.Batch], size: int = 1) -> Windows:
    return [data[start : start + size] for start in range(0, len(data), size)]


SAVED_WINDOWS = in_windows(small.batches(8, 4))
"""What `Saved` trains on."""


def weights_by_hand(
    windows: Windows,
    *,
    skipped: Sequence[int] = (),
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = small.sgd,
) -> list[Weights]:
    """The weights before the first step, and after each step; steps count from 1."""
    model = small.filled_network()
    optimizer = make_optimizer(model)
    found = [small.weights(model)]
    for step, window in enumerate(windows, start=1):
        if step not in skipped:
            small.train_on(optimizer, [sum(small.mean_square(model, batch) / len(window) for batch in window)])
        found.append(small.weights(model))
    return found


def by_hand_averaged(
    windows: Windows,
    *,
    decay: float,
    warm_up: bool = True,
    every: int = 1,
    skipped: Sequence[int] = (),
    start: float | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = small.sgd,
) -> Weights:
    """The averages as one writes them, over whole tensors, from the first weights on, or from `start`."""
    average, *steps = weights_by_hand(windows, skipped=skipped, make_optimizer=make_optimizer)
    if start is not None:
        average = {name: torch.full_like(value, start) for name, value in average.items()}
    updates = 0
    for step, weights in enumerate(steps, start=1):
        if step % every == 0 and step not in skipped:
            keep = min(decay, (1 + updates) / (10 + updates)) if warm_up else decay
            average = {name: keep * average[name] + (1 - keep) * value for name, value in weights.items()}
            updates += 1
    return average


def averaged(callback: Any, model: str = "model") -> Weights:
    """Full copies of a callback's averages; a collective where they are sharded."""
    return {name: full(tensor).clone() for name, tensor in callback.averaged(model).items()}


def loss_with(values: Weights, length: int) -> float:
    """The loss of a model with these weights over the first samples."""
    model, data = small.network(), small.Samples(length)
    model.load_state_dict(values)
    with torch.no_grad():
        return small.mean_square(model, (data.x, data.y)).item()


class Poisoned(small.Alone):
    """The loss is NaN in some steps, or weighs nothing there."""

    poison: Sequence[int] = ()
    empty: Sequence[int] = ()

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        step = batch_idx + 1
        loss = small.mean_square(self.model, batch) * (float("nan") if step in self.poison else 1.0)
        weight = torch.tensor(0.0 if step in self.empty else 2.0) if self.empty else None
        self.backward(loss, weight=weight)
        self.step(self.model, self.optimizer)
        return {}


class Validated(small.Validates, small.Alone, dt.EvalMixin):
    """Keeps the metrics of each validation."""

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.metrics = [*vars(self).get("metrics", []), metrics]


class Saved(small.Validates, small.Sharded, dt.EvalMixin, dt.CheckpointMixin):
    """Eight steps of four samples at any number of ranks."""

    def __init__(self, config: small.Config, make_optimizer: Any = small.sgd) -> None:
        train, val = DistributedDataLoader(small.Samples(32), 2), DistributedDataLoader(small.Samples(8), 2)
        super().__init__(config, train, val, make_optimizer=make_optimizer)


def saved_config(steps: int, *callbacks: dt.Callback, **options: Any) -> small.Config:
    saves = {"checkpoint": CheckpointParameters(save_every_n_epochs=None)}
    return small.make_config(max_steps=steps, global_batch_size=4, callbacks=callbacks, **saves | options)
