"""Parameters that only some ranks use in a step, against one process that sees every rank's batches."""

import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer.trainer.step import gradients as step_gradients
from tests.api import DistributedDataLoader
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import (
    BY_BLOCKS,
    WIDTH,
    Batch,
    Samples,
    Sharded,
    Spread,
    error_of,
    fill,
    make_config,
    sharded,
    train_by_hand,
    weights,
    windows,
)
from tests.worlds import run_each, run_world

LENGTH, SIZE = 24, 2
POLICIES = ("no_sync", "reduce_scatter_each", "defer_all_reduce")


class Case(NamedTuple):
    kind: str
    layout: str
    accumulation: int = 1
    weighted: bool = False
    sync_policy: str = "no_sync"


class Branches(nn.Module):
    """Two blocks, three heads of one size and an auxiliary head; a batch's number decides which of them it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 1) for name in "abc"})
        self.auxiliary = nn.Linear(WIDTH, 1)
        self.never = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, x: Tensor, kind: str, number: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            if kind != "blocks" or (index + number) % 3:
                x = block(x)
        if kind == "auxiliary":
            found = self.heads["a"](x)
            return found + self.auxiliary(x) if number % 2 == 0 else found
        return self.heads["abc"[number % 3]](x)  # two ranks leave one of three out, another one each step


def number_of(batch: Batch) -> int:
    return int(batch[2][0]) // SIZE


def count_of(batch: Batch) -> int:
    return number_of(batch) % 4 + 1


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Moves a parameter whose gradient is zero, and leaves one alone that has none."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5, fused=True)


def loss_of(kind: str, model: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(model(batch[0], kind, number_of(batch)), batch[1])


class Uneven(Spread):
    case: Case
    make_model = Branches

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)

    def loss_of(self, batch: Batch) -> Tensor:
        return loss_of(self.case.kind, self.model, batch)

    def weight_of(self, batch: Batch) -> int | None:
        return count_of(batch) if self.case.weighted else None


def made(case: Case, config: Any, *, is_sharded: bool) -> Uneven:
    data = DistributedDataLoader(Samples(LENGTH), SIZE)
    trainer = (sharded(Uneven) if is_sharded else Uneven)(config, data, make_optimizer=adamw)
    trainer.case = case
    return trainer


def train(case: Case) -> dict[str, Any]:
    is_overlapped = case.layout == "overlapped"
    step_gradients.BUCKET_BYTES = 60 if is_overlapped else 25 * 2**20  # so that some leave before a backward is over
    config = make_config(
        devices=dt.DeviceParameters(device="cpu", overlap_reduce=is_overlapped),
        fsdp=BY_BLOCKS if case.layout == "blocks" else None,
        n_epochs=2,
        gradient_accumulation_steps=case.accumulation,
        sync_policy=case.sync_policy,
    )
    with made(case, config, is_sharded=case.layout in ("fsdp", "blocks")) as trainer:
        trainer.fit()
        return {"weights": weights(trainer.model), "norms": trainer.norms}


def by_hand(case: Case) -> dict[str, Any]:
    model = Branches()
    fill(model)
    weight_of = count_of if case.weighted else lambda batch: 1
    epochs = 2 * windows(LENGTH, SIZE, 2 * case.accumulation)
    norms = train_by_hand(model, adamw(model), epochs, partial(loss_of, case.kind), weight_of=weight_of)
    return {"weights": weights(model), "norms": norms}


LAYOUTS = ("replicate", "overlapped", "fsdp", "blocks")
CASES = [
    *(Case("changing", layout) for layout in LAYOUTS),
    *(Case("changing", layout, 3, weighted=True) for layout in LAYOUTS),
    *(Case("auxiliary", layout, 2, sync_policy=policy) for layout in ("replicate", "blocks") for policy in POLICIES),
    # A replica may leave whole blocks out, as may a rank whose sharded model is whole in steps.
    *(Case("blocks", layout, 2, weighted=True) for layout in ("replicate", "fsdp", "overlapped")),
]


@pytest.mark.pitfall(69)
def test_a_parameter_that_some_ranks_use_is_trained_as_in_one_process() -> None:
    for case, ranks in run_each(train, 2, CASES):
        expected = by_hand(case)
        for found in ranks:
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, msg=f"{case}: {{}}".format)


def refused() -> tuple[str, dict[str, Tensor]]:
    trainer = made(Case("blocks", "fsdp"), make_config(n_epochs=1, fsdp=BY_BLOCKS), is_sharded=True)
    return error_of(trainer), weights(trainer.model)


@pytest.mark.pitfall(69)
def test_a_sharded_block_that_only_other_ranks_ran_is_refused_by_name() -> None:
    model = Branches()
    fill(model)
    for rank, (message, found) in enumerate(run_world(refused, 2)):
        assert re.search(rf"the block of model\.blocks\.\d\.0\.weight in this window, and rank {rank} did not", message)
        assert same_bits(found, weights(model))


class Heads(nn.Module):
    """Two heads in a list, which are blocks; how a rank runs them depends on its task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, how: str, task: int) -> Tensor:
        x = torch.tanh(self.trunk(x))
        if how == "other order":
            found = {index: self.heads[index](x) for index in ((0, 1) if task == 0 else (1, 0))}
            return found[0] + 2 * found[1]
        if how == "without gradients":
            with torch.no_grad():
                self.heads[1 - task](x)
            return self.heads[task](x)
        return [head(x) for head in self.heads][task]


class Tasks(Sharded, dt.CheckpointMixin):
    how = ""
    make_model = Heads

    def loss_of(self, batch: Batch) -> Tensor:
        return self.model(batch[0], self.how, self.world.rank).square().mean()


def run_tasks(how: str, saves: bool) -> tuple[str, int]:
    checkpoint = dt.CheckpointParameters(
        save_every_n_steps=1 if saves else None, save_every_n_epochs=None, save_at_end=False, async_save=False
    )
    config = make_config(max_steps=2, fsdp=BY_BLOCKS, checkpoint=checkpoint)
    trainer = Tasks(config, DistributedDataLoader(Samples(8), SIZE))
    trainer.how = how
    return error_of(trainer), len(trainer.checkpoints())


@pytest.mark.pitfall(69)
@pytest.mark.parametrize(
    ("how", "saves"),
    [("other backward", False), ("other backward", True), ("other order", True), ("without gradients", True)],
)
def test_blocks_that_ranks_run_in_different_orders_are_refused_and_never_saved(how: str, saves: bool) -> None:
    for said, saved in run_world(run_tasks, 2, how, saves):
        assert "in different orders" in said
        assert saved == 0
