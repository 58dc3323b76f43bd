"""Optimizers and schedules from config inside a trainer: built, clipped together, saved, resumed."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.late_norms import norms_are_read_late
from tests.optim.models import N_TOKENS, Transformer, loss
from tests.trainer.arithmetic import full
from tests.trainer.small import fit, run_config
from tests.worlds import run_world

TOKENS = list(torch.randint(0, N_TOKENS, (64, 4), generator=torch.Generator().manual_seed(2)))
MUON = dt.OptimizerParameters(
    name="muon", lr=0.02, layer_decay=0.8, groups=(dt.GroupParameters(pattern="^head", lr_scale=2.0),)
)
SAVED = {
    "logger_parameters": dt.LoggerParameters(loggers=("jsonl",)),
    "checkpoint_parameters": dt.CheckpointParameters(),
}
COSINE = dt.ScheduleParameters(name="cosine", warmup_steps=0.25, min_lr_ratio=0.1)


@dataclass(kw_only=True)
class Config(dt.DreamTrainerConfig):
    optimizer: dt.OptimizerParameters = MUON
    schedule: dt.ScheduleParameters = COSINE
    frozen: tuple[str, ...] = ()
    stop_at: int | None = None


class Trainer(dt.DreamTrainer):
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps: list[tuple[float, float, float, list[float]]] = []

    def configure_models(self) -> None:
        self.model = Transformer()
        dt.freeze(self.model, self.config.frozen)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DataLoader(TOKENS, 8 // self.world.dp_size), None  # type: ignore[arg-type]

    def configure_optimizers(self) -> None:
        self.optimizers = dt.build_optimizers(self.config.optimizer, self.model)

    def configure_schedulers(self) -> None:
        self.schedulers = dt.build_schedules(self.config.schedule, self.optimizers, total_steps=self.total_steps)

    def pre_optimizer_step(self, model: Any, optimizer: Any) -> None:
        self.before = self.norm_by_hand()

    def post_optimizer_step(self, model: Any, optimizer: Any) -> None:
        self.after = self.norm_by_hand()

    def post_train_step(self) -> None:
        if self.global_step == self.config.stop_at:
            self.request_stop("the test says so")

    def norm_by_hand(self) -> float:
        return torch.stack([full(p.grad).norm() for p in self.model.parameters() if p.grad is not None]).norm().item()

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        value = loss(self.model, batch)
        self.backward(value)
        if not self.is_accumulating_gradients:
            norm = self.step(self.model, self.optimizers)
            self.steps.append((norm.item(), self.before, self.after, self.rates()))
            for scheduler in self.schedulers:
                scheduler.step()
        return {"loss": value}

    def rates(self) -> list[float]:
        return [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]


def run(config: Config) -> Trainer:
    return fit(Trainer(config))


@pytest.fixture
def config() -> Config:
    training = dt.TrainingParameters(max_steps=12, gradient_clip_norm=0.05)
    return run_config("whole", Config, training_parameters=training, **SAVED)


def test_muon_and_adamw_are_clipped_by_one_norm_over_both(config: Config) -> None:
    history = run(config).steps
    assert len(history) == 12
    for norm, expected, after, _ in history:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert norm > 0.05
        assert after == pytest.approx(0.05, rel=1e-4)


@pytest.mark.pitfall(60)
def test_a_run_stopped_and_resumed_has_the_same_weights_and_rates(config: Config) -> None:
    whole = run(config)
    stopped = run(replace(config, experiment="parts", stop_at=5))
    resumed = run(replace(config, experiment="parts"))
    assert len(stopped.steps) == 5
    assert stopped.steps + resumed.steps == whole.steps
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_frozen_base_trains_its_head_alone(config: Config) -> None:
    frozen = replace(config, optimizer=dt.OptimizerParameters(lr=0.1), frozen=(r"^(?!head\.)",))
    trainer = run(frozen)
    (optimizer,) = trainer.optimizers
    assert sorted(n for g in optimizer.param_groups for n in g["param_names"]) == ["head.bias", "head.weight"]
    untouched = run(replace(frozen, experiment="untouched", training_parameters=dt.TrainingParameters(max_steps=0)))
    for (name, trained), start in zip(trainer.model.named_parameters(), untouched.model.parameters(), strict=True):
        assert torch.equal(trained, start) is not name.startswith("head."), name


class Exact(Trainer):
    """Muon's rounding to bfloat16 would hide what ranks do; the last window's loss is not a number."""

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.optimizers[0].iteration_dtype = torch.float32

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        self.factor = float("nan") if self.global_step == 3 else 1.0
        value = loss(self.model, batch) * self.factor
        self.backward(value)
        self.step(self.model, self.optimizers)
        return {"loss": value}


@norms_are_read_late()
def muon_weights(directory: Path, **mesh: int) -> tuple[dict[str, Tensor], bool]:
    """After three good steps and a bad one, skipped: whole weights, and whether ranks share Muon's work."""
    os.chdir(directory)
    training, devices = (
        dt.TrainingParameters(max_steps=4, on_nonfinite="skip"),
        dt.DeviceParameters(device="cpu", **mesh),
    )
    config = run_config("-".join(mesh) or "one", Config, device_parameters=devices, training_parameters=training)
    with Exact(config) as trainer:
        trainer.fit()
        assert trainer.skipped_steps == 1
        with trainer.gathered(trainer.model):
            found = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return found, trainer.optimizers[0].replicas is not None


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2, "dp_shard": 1}, {"dp_replicate": 1, "dp_shard": 2}])
def test_muon_on_two_ranks_trains_as_on_one(mesh: dict[str, int], tmp_path: Path) -> None:
    expected, is_shared = muon_weights(tmp_path)
    assert not is_shared
    for found, is_shared in run_world(partial(muon_weights, **mesh), 2, tmp_path):
        assert is_shared
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)
