"""Models that are frozen are whole on each rank of a pipeline, beside the one that is cut."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from tests.trainer.arithmetic import full
from tests.trainer.stages import Case, Model, Trained, config_of, weights_of
from tests.worlds import run_world


def distance(scores: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(0, 1))


class Distilled(Trained):
    """Learns what a frozen teacher says; another model is a part of the loss, where the last stage is."""

    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = Model(replace(self.config.case, tied=False)).requires_grad_(False)
        self.judge = torch.nn.Linear(13, 1, dtype=torch.float64).requires_grad_(False)

    def loss_fn(self, scores: Tensor, wanted: Tensor) -> Tensor:
        return distance(scores, wanted) + 0.1 * self.judge(scores - wanted).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, _ = batch
        with torch.no_grad():
            wanted = self.teacher(tokens).softmax(-1)
        loss = self.forward_backward(self.model, (tokens,), wanted, self.loss_fn, weight=len)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        tokens, _ = batch
        wanted = self.teacher(tokens).softmax(-1)
        return {"loss": self.forward_backward(self.model, (tokens,), wanted, self.loss_fn, weight=len)}


def train(cases: list[Case], experiment: str, directory: str, *steps: int) -> list[dict[str, Any]]:
    os.chdir(directory)
    results = []
    for case in cases:
        for max_steps in steps:
            config = replace(
                config_of(case, experiment, max_steps=max_steps),
                checkpoint_parameters=dt.CheckpointParameters(
                    save_every_n_epochs=None, save_at_end=experiment == "hops"
                ),
            )
            with Distilled(config) as trainer:
                trainer.fit()
                losses = dict(trainer.logged)
                results.append({"norms": trainer.norms, "losses": losses, "weights": weights_of(trainer)})
                results[-1]["teacher"] = {n: full(p).clone() for n, p in trainer.teacher.named_parameters()}
    return results


def train_and_hop(cases: list[Case], directory: str) -> list[dict[str, Any]]:
    return [*train(cases, "case", directory, 4), *train(cases[:1], "hops", directory, 2)]


WORLD_2 = [Case(2), Case(2, schedule="ZBVZeroBubble", tied=True)]
WORLD_4 = [Case(2, dp=2, shard="auto", accumulation=2, microbatches=2), Case(2, dp=2, compile=True)]


@pytest.mark.parametrize(
    "cases", [pytest.param(WORLD_2, id="2 ranks"), pytest.param(WORLD_4, id="4 ranks", marks=pytest.mark.slow)]
)
def test_a_frozen_model_is_whole_beside_one_in_stages(cases: list[Case], tmp_path: Path) -> None:
    directory = str(tmp_path)
    kinds = [Case(tied=case.tied) for case in cases]
    (alone,) = run_world(train, 1, kinds, "alone", directory, 4)
    *by_case, hops = zip(*run_world(train_and_hop, cases[0].world_size, cases, directory), strict=True)
    for case, expected, ranks in zip(cases, alone, by_case, strict=True):
        for rank in ranks:
            assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-10), case
            for step, metrics in expected["losses"].items():
                assert rank["losses"][step] == pytest.approx(metrics, rel=1e-10), case
            for name, value in rank["weights"].items():
                of_whole = "embedding.weight" if case.tied and name == "head.weight" else name
                torch.testing.assert_close(value, expected["weights"][of_whole], rtol=1e-10, atol=1e-10, msg=name)
            assert all(torch.equal(value, expected["teacher"][name]) for name, value in rank["teacher"].items())
    ((last,),) = run_world(train, 1, kinds[:1], "hops", directory, 4)
    assert [*hops[0]["norms"], *last["norms"]] == pytest.approx(alone[0]["norms"], rel=1e-10)
    for name, value in alone[0]["weights"].items():
        torch.testing.assert_close(last["weights"][name], value, rtol=1e-9, atol=1e-9, msg=name)
