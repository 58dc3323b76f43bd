"""Gradients that are differentiated again: penalties on the gradient of a critic, against a loop by hand."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.trainer.small import (
    BY_BLOCKS,
    Batch,
    filled_network,
    fit_each,
    make_config,
    network,
    sgd,
    sharded,
    train_on,
    weights,
)
from tests.trainer.test_several_models import Body, micro_batches
from tests.worlds import run_world


class Case(NamedTuple):
    """Where the penalty stands beside the critic's own loss, and how it is trained."""

    kind: str
    layout: str
    accumulation: int = 1


def penalty(critic: nn.Module, x: Tensor) -> Tensor:
    x = (x * 0.5).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def loss_of(kind: str, critic: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if kind == "before":
        return penalty(critic, x) + mse_loss(critic(x), y)
    if kind == "after":
        return mse_loss(critic(x), y) + penalty(critic, x)
    if kind == "of the same output":
        x = x.clone().requires_grad_()
        found = critic(x)
        (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return mse_loss(found, y) + ((gradient.norm(dim=1) - 1) ** 2).mean()
    return penalty(critic, x)


class Penalised(Body):
    options: Case

    def configure_models(self) -> None:
        self.critic = network()

    def configure_optimizers(self) -> None:
        self.optimizer = sgd(self.critic)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(loss_of(self.options.kind, self.critic, batch[0], batch[1]))
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.critic, self.optimizer)))
        return {}


CASES = [
    Case(kind, layout, accumulation)
    for layout in ("replicate", "fsdp", "blocks")
    for kind, accumulation in (("alone", 2), ("before", 1), ("after", 2), ("of the same output", 1))
]


def train_all() -> list[dict[str, Tensor]]:
    def made(case: Case) -> Penalised:
        fsdp = BY_BLOCKS if case.layout == "blocks" else None
        config = make_config(n_epochs=1, gradient_accumulation_steps=case.accumulation, fsdp=fsdp)
        return (Penalised if case.layout == "replicate" else sharded(Penalised))(config, case)

    return fit_each(map(made, CASES), lambda trainer: weights(trainer.critic))


@pytest.mark.pitfall(84)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_penalty_on_a_gradient_trains_as_by_hand(n_ranks: int) -> None:
    for case, *ranks in zip(CASES, *run_world(train_all, n_ranks, timeout=60), strict=True):
        critic = filled_network()
        windows = ([batch for row in window for batch in row] for window in micro_batches(n_ranks, case.accumulation))
        losses = (sum(loss_of(case.kind, critic, x, y) for x, y, _ in window) / len(window) for window in windows)
        train_on(sgd(critic), losses)
        for found in ranks:
            torch.testing.assert_close(found, weights(critic), rtol=1e-10, atol=1e-12, msg=f"{case}: {{}}".format)
