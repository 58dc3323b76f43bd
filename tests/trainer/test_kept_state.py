"""Where a run goes on in the middle of an epoch, `pre_epoch` is called again and the state of then holds."""

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer import small
from tests.trainer.arithmetic import same_bits
from tests.trainer.saves import make_config
from tests.trainer.small import Batch, Samples, weights
from tests.worlds import run_world

PER_EPOCH, LAST = 4, 10
STOPS = (2, 5, 8)  # within the first epoch and the second, and at the end of one


class Sums(dt.Callback):
    """Begins sums anew in each epoch: a number, and a tensor that a checkpoint has as one."""

    def __init__(self) -> None:
        self.steps = 0

    def post_setup(self, trainer: Any) -> None:
        self.total = torch.zeros_like(trainer.model[1].weight)

    def pre_epoch(self, trainer: Any) -> None:
        self.steps = 0
        self.total.zero_()

    def post_train_step(self, trainer: Any) -> None:
        self.steps += 1
        self.total += trainer.model[1].weight.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return {"total": self.total}


class Wipes(small.Sharded, dt.CheckpointMixin):
    """Begins everything anew in each epoch, in place too, and draws random numbers there."""

    def __init__(self, config: Any, train: Any, stop_after: int | None) -> None:
        super().__init__(config, train)
        self.stop_after = stop_after
        self.shared: dict[str, list[int]] = {"steps": []}
        self.own: list[float] = []
        self.told: list[Any] = []

    def configure_models(self) -> None:
        super().configure_models()
        self.model.register_buffer("rows", torch.zeros(0, dtype=torch.float64))

    def pre_epoch(self) -> None:
        self.shared["steps"].clear()
        self.own.clear()
        self.model.rows = self.model.rows.new_zeros(0)
        self.begun = random.random()  # which no checkpoint has
        torch.rand(3)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        assert self.begun
        self.shared["steps"].append(self.global_step)
        self.own.append(float(torch.rand(())))
        self.model.rows = torch.cat([self.model.rows, batch[0].sum().view(1)])
        return super().training_step((batch[0] * (1 + self.own[0]), *batch[1:]), batch_idx)

    def post_train_step(self) -> None:
        self.told.append((self.global_step, list(self.shared["steps"]), list(self.own), self.model.rows.tolist()))
        if self.global_step == self.stop_after:
            self.request_stop("the test says so")

    def state_dict(self) -> dict[str, Any]:
        return {"shared": self.shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shared = state["shared"]

    def rank_state_dict(self) -> dict[str, Any]:
        return {"own": self.own}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["own"]


def train(experiment: str, stop_after: int | None) -> tuple[list[Any], list[Any], dict[str, Tensor]]:
    config = make_config(experiment=experiment, training={"max_steps": LAST}, callbacks=[Sums()])
    batch = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    with Wipes(config, DistributedDataLoader(Samples(4 * PER_EPOCH), batch), stop_after) as trainer:
        trainer.fit()
        sums = trainer.get_callback(Sums)
        total = {"total": small.full(sums.total).clone()}
        return trainer.told, [sums.steps, trainer.world.rank], weights(trainer.model) | total


def train_all() -> list[Any]:
    found = [train("straight", None)]
    parts = [train("stopped", stop) for stop in (*STOPS, None)]
    return [*found, ([line for told, _, _ in parts for line in told], *parts[-1][1:])]


def assert_same(straight: Any, stopped: Any) -> None:
    assert stopped[:2] == straight[:2]
    assert same_bits(stopped[2], straight[2])


@pytest.mark.pitfall(98)
def test_what_pre_epoch_begins_anew_goes_on_in_the_middle_of_an_epoch() -> None:
    straight, stopped = train_all()
    assert [len(rows) for *_, rows in straight[0]] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert_same(straight, stopped)


@pytest.mark.pitfall(98)
def test_on_two_ranks_each_goes_on_with_its_own() -> None:
    ranks = run_world(train_all, 2)
    assert ranks[0][0][0][0][2] != ranks[1][0][0][0][2]
    for straight, stopped in ranks:
        assert_same(straight, stopped)
