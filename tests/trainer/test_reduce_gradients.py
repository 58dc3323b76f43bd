"""Gradients between `backward` and `step`: those of the global batch after `reduce_gradients`, on every mesh."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.small import (
    BY_BLOCKS,
    Samples,
    Sharded,
    error_of,
    filled_network,
    make_config,
    sgd,
    weights,
    windows,
)
from tests.worlds import run_world

LENGTH, SIZE, LIMIT, RADIUS = 24, 2, 0.05, 0.3
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"devices": dt.DeviceParameters(device="cpu", dp_shard=2)},
    "blocks": {"devices": dt.DeviceParameters(device="cpu", dp_shard=2), "fsdp": BY_BLOCKS},
    "replicas": {"devices": dt.DeviceParameters(device="cpu", dp_shard=1, dp_replicate=2)},
    "overlapped": {"devices": dt.DeviceParameters(device="cpu", dp_shard=1, dp_replicate=2, overlap_reduce=True)},
}


def count_of(number: Tensor) -> int:
    return int(number[0]) % 3 + 1


def perturbation(parameters: list[nn.Parameter]) -> list[Tensor]:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return [RADIUS / norm.item() * gradient for gradient in gradients]


@torch.no_grad()
def move(parameters: list[nn.Parameter], moves: list[Tensor], sign: int) -> None:
    for parameter, by in zip(parameters, moves, strict=True):
        parameter.add_(by, alpha=sign)


class Sharpness(Sharded):
    """SAM: the gradient of a second pass, with the weights moved along that of the first."""

    weighted = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y, number = batch
        weight = count_of(number) if self.weighted else None
        self.backward(mse_loss(self.model(x), y), weight=weight)
        self.reduce_gradients(self.optimizer)
        parameters = list(self.model.parameters())
        moves = perturbation(parameters)
        move(parameters, moves, 1)
        self.optimizer.zero_grad()
        self.backward(mse_loss(self.model(x), y), weight=weight)
        move(parameters, moves, -1)
        self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


class Weighted(Sharpness):
    weighted = True


class Clips(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        if not self.is_accumulating_gradients:
            self.reduce_gradients(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


def train(cls: type[Sharded], layout: str, accumulation: int) -> dict[str, Any]:
    config = make_config(n_epochs=1, gradient_accumulation_steps=accumulation, **LAYOUTS[layout])
    with cls(config, DistributedDataLoader(Samples(LENGTH), SIZE)) as trainer:
        trainer.fit()
        return {"weights": weights(trainer.model), "norms": trainer.norms}


def by_hand(cls: type[Sharded], accumulation: int) -> dict[str, Any]:
    model, norms = filled_network(), []
    optimizer, parameters = sgd(model), list(model.parameters())
    for window in windows(LENGTH, SIZE, 2 * accumulation):
        if cls is Clips:
            backward(model, window, lambda number: 1)
            nn.utils.clip_grad_norm_(parameters, LIMIT)
        else:
            of = count_of if cls is Weighted else lambda number: 1
            backward(model, window, of)
            moves = perturbation(parameters)
            move(parameters, moves, 1)
            optimizer.zero_grad()
            backward(model, window, of)
            move(parameters, moves, -1)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in parameters]).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model), "norms": norms}


def backward(model: nn.Module, window: list[Any], weight_of: Callable[[Tensor], int]) -> None:
    total = sum(weight_of(number) for *_, number in window)
    for x, y, number in window:
        (mse_loss(model(x), y) * weight_of(number) / total).backward()


CASES = [*((cls, layout, 1) for cls in (Sharpness, Weighted) for layout in LAYOUTS), *((Clips, n, 3) for n in LAYOUTS)]


def train_all() -> list[dict[str, Any]]:
    return [train(*case) for case in CASES]


@pytest.mark.pitfall(103)
def test_sam_and_clipping_by_hand_are_those_of_one_process_on_every_mesh() -> None:
    for *ranks, (cls, layout, accumulation) in zip(*run_world(train_all, 2), CASES, strict=True):
        expected = by_hand(cls, accumulation)
        for found in ranks:
            torch.testing.assert_close(
                found, expected, rtol=1e-10, atol=1e-10, msg=f"{cls.__name__} on {layout}: {{}}".format
            )


class ClipsEarly(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
        self.step(self.model, self.optimizer)
        return {}


class MovesEarly(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(parameter.grad)
        self.optimizer.zero_grad()
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        self.step(self.model, self.optimizer)
        return {}


class AddsLate(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        for _ in range(2):
            self.backward(mse_loss(self.model(batch[0]), batch[1]))
            self.reduce_gradients(self.optimizer)
        self.step(self.model, self.optimizer)
        return {}


def refused(cls: type[Sharded], layout: str) -> tuple[str, int]:
    trainer = cls(make_config(n_epochs=1, **LAYOUTS[layout]), DistributedDataLoader(Samples(LENGTH), SIZE))
    return error_of(trainer), trainer.global_step


def refuse_all() -> list[tuple[str, int]]:
    return [refused(cls, layout) for cls in (ClipsEarly, MovesEarly, AddsLate) for layout in ("shards", "replicas")]


@pytest.mark.pitfall(103)
def test_code_that_uses_a_ranks_own_gradients_is_refused_before_a_step() -> None:
    words = ["a gradient of shape"] * 2 + ["parameters of shape"] * 2 + ["zero_grad"] * 2
    for rank in run_world(refuse_all, 2):
        for (message, steps), word in zip(rank, words, strict=True):
            assert word in message
            assert "reduce_gradients" in message
            assert steps == 0


def test_in_one_process_gradients_are_normalised_too() -> None:
    config = make_config(n_epochs=1, gradient_accumulation_steps=2)
    with Clips(config, torch.utils.data.DataLoader(Samples(LENGTH), SIZE)) as trainer:
        trainer.fit()
        found = {"weights": weights(trainer.model), "norms": trainer.norms}
    torch.testing.assert_close(found, by_hand(Clips, 1), rtol=1e-10, atol=1e-10)
