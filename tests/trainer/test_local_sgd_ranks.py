"""LocalSGDMixin beside other ranks in each worker after a stop, several models, other types, a NaN on one rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.arithmetic import full
from tests.trainer.test_local_sgd import CPU, DILOCO, REPLICAS, SHARDED, Trainer, make_config
from tests.worlds import run_world

SAMPLES, GLOBAL_BATCH = 8 * 8, 4


def make_data() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Several(Trainer):
    """Two models with an optimizer each, of which one steps in every second window, and one in bfloat16."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.other = nn.Linear(4, 2).double()
        self.short = nn.Linear(4, 1).bfloat16()

    def init_weights(self) -> None:
        fill_all(self.named_models())

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.second = torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9)
        self.third = torch.optim.SGD(self.short.parameters(), lr=0.1)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DataLoader(make_data(), batch_size=GLOBAL_BATCH // self.world.world_size), None

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        losses = losses_of(self.named_models(), batch)
        self.backward(sum(losses))
        self.step(self.model, self.optimizer)
        if self.global_step % 2:
            self.step(self.other, self.second)
        else:
            self.other.zero_grad()
        self.step(self.short, self.third)
        return {"loss": losses[0]}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {}

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        pass


def fill_all(models: dict[str, nn.Module]) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in sorted(models):
            for p in models[name].parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 4)


def losses_of(models: dict[str, nn.Module], batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    x, y = batch
    third = mse_loss(models["short"](x.bfloat16()), y.bfloat16())
    return [mse_loss(models["model"](x), y), models["other"](x).square().mean(), third.double()]


def config_of(name: str, steps: int, **options: Any) -> Any:
    config = make_config(name, replace(DILOCO), steps=steps, **options)
    config.training_parameters = replace(config.training_parameters, gradient_clip_val=None)
    return config


def train(runs: list[tuple[str, int, dict[str, Any]]]) -> dict[str, dict[str, Tensor]]:
    """Of each run what this rank's worker has at its end."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, steps, options in runs:
        with Several(config_of(name, steps, **options), [], []) as trainer:
            trainer.fit()
            models = trainer.named_models()
            found[f"{name} {steps}"] = {
                f"{key}.{path}": full(p).detach().clone()
                for key, model in models.items()
                for path, p in model.named_parameters()
            }
    return found


def by_hand(steps: int) -> list[dict[str, Tensor]]:
    """Two workers, each with its half of each global batch."""
    workers = []
    for _ in range(2):
        models: dict[str, nn.Module] = {
            "model": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
            "other": nn.Linear(4, 2).double(),
            "short": nn.Linear(4, 1).bfloat16(),
        }
        fill_all(models)
        first = torch.optim.AdamW(models["model"].parameters(), lr=0.02)
        second = torch.optim.SGD(models["other"].parameters(), lr=0.1, momentum=0.9)
        workers.append((models, first, second, torch.optim.SGD(models["short"].parameters(), lr=0.1)))
    flat = [[p for name in models for p in models[name].parameters()] for models, *_ in workers]
    begin = [p.detach().clone() for p in flat[0]]
    outer = torch.optim.SGD(begin, DILOCO.outer_lr, DILOCO.outer_momentum, nesterov=True)
    data, half = make_data(), GLOBAL_BATCH // 2
    for step in range(steps):
        for number, (models, first, second, third) in enumerate(workers):
            at = (step * GLOBAL_BATCH) % SAMPLES + number * half
            sum(losses_of(models, data[at : at + half])).backward()
            first.step()
            third.step()
            if step % 2:
                second.step()
            for optimizer in (first, second, third):
                optimizer.zero_grad()
        if (step + 1) % DILOCO.every_n_steps == 0:
            for p, one, two in zip(begin, *flat, strict=True):
                p.grad = ((p - one.detach()) + (p - two.detach())) / 2
            outer.step()
            with torch.no_grad():
                for p, one, two in zip(begin, *flat, strict=True):
                    one.copy_(p)
                    two.copy_(p)
    return [
        {f"{key}.{path}": p.detach() for key, model in models.items() for path, p in model.named_parameters()}
        for models, *_ in workers
    ]


def assert_all_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if value.dtype is torch.bfloat16:  # a half batch on each of two ranks is summed in another order
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.02)
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_several_models_and_a_run_that_goes_on_with_other_ranks_in_each_worker() -> None:
    """It stops in the middle of a round, twice: two workers of one rank, of two replicas or shards, of one again."""
    saves = {"save_every_n_steps": 6}
    steps = 14
    two = run_world(train, 2, [("replicas", 6, saves), ("shards", 6, saves), ("straight", steps, {})])
    later = {"save_every_n_steps": 11}
    four = [("replicas", 11, later | {"devices": REPLICAS}), ("shards", 11, later | {"devices": SHARDED})]
    run_world(train, 4, four)
    again = run_world(train, 2, [("replicas", steps, {}), ("shards", steps, {})])
    expected = by_hand(steps)
    for worker in range(2):
        assert_all_close(two[worker]["straight 14"], expected[worker])
        assert_all_close(again[worker]["replicas 14"], expected[worker])
        assert_all_close(again[worker]["shards 14"], expected[worker])
    whole = by_hand(12)
    assert all(torch.equal(whole[0][name], whole[1][name]) for name in whole[0])
    assert not torch.equal(expected[0]["model.0.weight"], expected[1]["model.0.weight"])


class Broken(Several):
    """A NaN on the last worker, in the middle of a round."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 5 and self.world.worker == 1:
            batch = [part * float("nan") for part in batch]
        return super().training_step(batch, batch_idx)


def break_one() -> None:
    os.dup2(os.open(f"errors {os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
    Broken(config_of("broken", 14, save_every_n_steps=4, devices=CPU), [], []).fit()


def test_a_gradient_that_is_not_finite_ends_all_workers_and_no_average_has_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run_world(break_one, 2)
    assert "NonFiniteError" in (tmp_path / "errors 1").read_text()
    assert "rank 1" in (tmp_path / "errors 0").read_text()
    saved = {path.name for path in (tmp_path / "runs/tests/local/broken/checkpoints").glob("step_*")}
    assert saved <= {"step_00000004"}
