"""Code that reads or writes shards while a small model is whole, or the other way round: 2 shards as one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.arithmetic import full
from tests.trainer.small import Samples, Sharded, error_of, make_config, weights
from tests.worlds import run_world

LENGTH, GLOBAL = 24, 4


class OwnLists(torch.optim.SGD):
    """Works on parameters that it holds beside its groups, with averages of them from its constructor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        mine = [p for group in self.param_groups for p in group["params"]]
        self.halves = {"first": mine[:2], "rest": tuple(mine[2:])}
        self.averages = [p.detach().clone() for p in mine]
        self.inner = torch.optim.SGD([{"params": mine[:2]}, {"params": mine[2:]}], lr=lr)

    def halve_gradients(self) -> None:
        for p in (*self.halves["first"], *self.halves["rest"]):
            assert p.grad is not None
            p.grad.mul_(0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for p, average in zip([*self.halves["first"], *self.halves["rest"]], self.averages, strict=True):
            average.lerp_(p, 0.1)
            p.lerp_(average, 0.5)


class Hidden:
    def __init__(self, params: Any) -> None:
        self.params = params


class Hides(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.hidden = Hidden([p for group in self.param_groups for p in group["params"]])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.hidden.params:
            p.mul_(0.9)


OWN: dict[str, Any] = {
    "state of the constructor": torch.optim.Adagrad,
    "an optimizer's lists": OwnLists,
    "an optimizer's objects": Hides,
}


class Trained(Sharded, dt.CheckpointMixin):
    kind = ""

    def configure_optimizers(self) -> None:
        self.kept = list(self.model[0].parameters())
        make = OWN.get(self.kind, torch.optim.Adam)
        self.optimizer = make(self.model.parameters(), lr=0.05)
        self.found: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        if self.kind == "an optimizer's lists":
            self.reduce_gradients(self.optimizer)
            self.optimizer.halve_gradients()
        if self.kind == "kept list":
            self.reduce_gradients(self.optimizer)
            nn.utils.clip_grad_norm_(self.kept, 0.01)
        self.step(self.model, self.optimizer)
        if self.kind in ("average of clamped", "kept list"):
            for parameter in self.kept:
                parameter.data.clamp_(-0.2, 0.2)
        return {}

    def post_epoch(self) -> None:
        if self.kind == "averages in an event":
            self.look_at_averages()
        if self.kind == "saved in an event":
            self.save_checkpoint()
            self.load_checkpoint(self.checkpoints()[-1].path)
        if self.kind == "weights in an event":
            with self.changing_weights():
                for parameter in self.model.parameters():
                    parameter.data.mul_(0.9)

    def look_at_averages(self) -> None:
        with self.get_callback(dt.EMA).averaged_weights():
            self.found.append(float(self.model(Samples(LENGTH).x).sum()))


KINDS = [
    *("average of clamped", "averages in an event", "saved in an event", "weights in an event"),
    *("kept list", "state of the constructor", "an optimizer's lists"),
]


def train(kind: str, directory: str) -> dict[str, Any]:
    os.chdir(directory)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = make_config(experiment=kind.replace(" ", "-"), n_epochs=3, callbacks=[dt.EMA(0.5)])
    trainer = Trained(config, DistributedDataLoader(Samples(LENGTH), GLOBAL // ranks))
    trainer.kind = kind
    with trainer:
        trainer.fit()
        averages = {name: full(value) for name, value in trainer.get_callback(dt.EMA).averaged("model").items()}
        return {"weights": weights(trainer.model), "averages": averages, "found": trainer.found}


def train_all(directory: str) -> list[dict[str, Any]]:
    return [train(kind, directory) for kind in KINDS]


@pytest.mark.pitfall(104)
def test_shards_and_whole_parameters_are_never_apart(tmp_path: Path) -> None:
    directories = [str(tmp_path / name) for name in ("one", "two")]
    for directory in directories:
        os.mkdir(directory)
    (alone,) = run_world(train_all, 1, directories[0])
    for found in run_world(train_all, 2, directories[1]):
        for kind, result, expected in zip(KINDS, found, alone, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10, msg=f"{kind}: {{}}".format)


def refused() -> str:
    trainer = Trained(make_config(n_epochs=1), DistributedDataLoader(Samples(LENGTH), 2))
    trainer.kind = "an optimizer's objects"
    return error_of(trainer)


def test_an_optimizer_that_would_write_beside_the_shards_is_refused_on_all_ranks() -> None:
    for said in run_world(refused, 2):
        assert "0.0.0.weight" in said
        assert "param_groups" in said
