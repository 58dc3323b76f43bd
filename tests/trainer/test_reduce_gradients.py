"""Gradients between `backward` and `step`: those of the global batch after `reduce_gradients`, on every mesh."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer import small
from tests.trainer.small import BY_BLOCKS, Samples, Sharded, make_config, mean_square, weights
from tests.worlds import run_each

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
        weight = count_of(batch[2]) if self.weighted else None
        self.backward(mean_square(self.model, batch), weight=weight)
        self.reduce_gradients(self.optimizer)
        parameters = list(self.model.parameters())
        moves = perturbation(parameters)
        move(parameters, moves, 1)
        self.optimizer.zero_grad()
        self.backward(mean_square(self.model, batch), weight=weight)
        move(parameters, moves, -1)
        self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


class Weighted(Sharpness):
    weighted = True


class Clips(Sharded):
    reduces = True

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(mean_square(self.model, batch))
        if not self.is_accumulating_gradients:
            if self.reduces:
                self.reduce_gradients(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


def train(case: tuple[type[Sharded], str, int]) -> dict[str, Any]:
    cls, layout, accumulation = case
    config = make_config(n_epochs=1, gradient_accumulation_steps=accumulation, **LAYOUTS[layout])
    with cls(config, DistributedDataLoader(Samples(LENGTH), SIZE)) as trainer:
        trainer.fit()
        return {"weights": weights(trainer.model), "norms": trainer.norms}


def by_hand(cls: type[Sharded], accumulation: int) -> dict[str, Any]:
    model, norms = small.filled_network(), []
    optimizer, parameters = small.sgd(model), list(model.parameters())
    for window in small.windows(LENGTH, SIZE, 2 * accumulation):
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
    for batch in window:
        (mean_square(model, batch) * weight_of(batch[2]) / total).backward()


CASES = [*((cls, layout, 1) for cls in (Sharpness, Weighted) for layout in LAYOUTS), *((Clips, n, 3) for n in LAYOUTS)]


@pytest.mark.pitfall(103)
def test_sam_and_clipping_by_hand_are_those_of_one_process_on_every_mesh() -> None:
    for (cls, layout, accumulation), ranks in run_each(train, 2, CASES):
        expected = by_hand(cls, accumulation)
        for found in ranks:
            torch.testing.assert_close(
                found, expected, rtol=1e-10, atol=1e-10, msg=f"{cls.__name__} on {layout}: {{}}".format
            )


class ClipsEarly(Clips):
    reduces = False


class MovesEarly(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(mean_square(self.model, batch))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(parameter.grad)
        self.optimizer.zero_grad()
        self.backward(mean_square(self.model, batch))
        self.step(self.model, self.optimizer)
        return {}


class AddsLate(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        for _ in range(2):
            self.backward(mean_square(self.model, batch))
            self.reduce_gradients(self.optimizer)
        self.step(self.model, self.optimizer)
        return {}


def refused(case: tuple[type[Sharded], str]) -> tuple[str, int]:
    cls, layout = case
    trainer = cls(make_config(n_epochs=1, **LAYOUTS[layout]), DistributedDataLoader(Samples(LENGTH), SIZE))
    return small.error_of(trainer), trainer.global_step


@pytest.mark.pitfall(103)
def test_code_that_uses_a_ranks_own_gradients_is_refused_before_a_step() -> None:
    words = {ClipsEarly: "a gradient of shape", MovesEarly: "parameters of shape", AddsLate: "zero_grad"}
    cases = [(cls, layout) for cls in words for layout in ("shards", "replicas")]
    for (cls, _), ranks in run_each(refused, 2, cases):
        for message, steps in ranks:
            assert words[cls] in message
            assert "reduce_gradients" in message
            assert steps == 0


def test_in_one_process_gradients_are_normalised_too() -> None:
    config = make_config(n_epochs=1, gradient_accumulation_steps=2)
    trainer = small.fit(Clips(config, DataLoader(Samples(LENGTH), SIZE)))
    found = {"weights": weights(trainer.model), "norms": trainer.norms}
    torch.testing.assert_close(found, by_hand(Clips, 1), rtol=1e-10, atol=1e-10)
