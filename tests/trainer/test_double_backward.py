"""Gradients that are differentiated again: penalties on the gradient of a critic, against a loop by hand."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from tests.api import DistributedDataLoader
from tests.trainer import small
from tests.worlds import run_each


class Case(NamedTuple):
    """Where the penalty stands beside the critic's own loss, and how it is trained."""

    kind: str
    layout: str
    accumulation: int = 1


def penalty(critic: nn.Module, x: Tensor) -> Tensor:
    x = (x * 0.5).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def loss_of(kind: str, critic: nn.Module, batch: small.Batch) -> Tensor:
    if kind == "before":
        return penalty(critic, batch[0]) + small.mean_square(critic, batch)
    if kind == "after":
        return small.mean_square(critic, batch) + penalty(critic, batch[0])
    if kind == "of the same output":
        x = batch[0].clone().requires_grad_()
        found = critic(x)
        (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return nn.functional.mse_loss(found, batch[1]) + ((gradient.norm(dim=1) - 1) ** 2).mean()
    return penalty(critic, batch[0])


class Penalised(small.Spread):
    kind = ""

    def loss_of(self, batch: small.Batch) -> Tensor:
        return loss_of(self.kind, self.model, batch)


CASES = [
    Case(kind, layout, accumulation)
    for layout in ("replicate", "fsdp", "blocks")
    for kind, accumulation in (("alone", 2), ("before", 1), ("after", 2), ("of the same output", 1))
]


def train(case: Case) -> dict[str, Tensor]:
    fsdp = small.BY_BLOCKS if case.layout == "blocks" else None
    config = small.make_config(n_epochs=1, gradient_accumulation_steps=case.accumulation, fsdp=fsdp)
    kind = Penalised if case.layout == "replicate" else small.sharded(Penalised)
    with kind(config, DistributedDataLoader(small.Samples(24), 2)) as trainer:
        trainer.kind = case.kind
        trainer.fit()
        return small.weights(trainer.model)


@pytest.mark.pitfall(84)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_penalty_on_a_gradient_trains_as_by_hand(n_ranks: int) -> None:
    for case, ranks in run_each(train, n_ranks, CASES):
        critic = small.filled_network()
        small.train_by_hand(
            critic, small.sgd(critic), small.windows(24, 2, n_ranks * case.accumulation), partial(loss_of, case.kind)
        )
        for found in ranks:
            torch.testing.assert_close(found, small.weights(critic), rtol=1e-10, atol=1e-12, msg=f"{case}: {{}}".format)
