"""Tensor parallelism changes how the work is divided and nothing else: weights, counts, metrics and checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from tests.api import ConfigError, DistributedDataLoader
from tests.trainer.arithmetic import (
    BATCH,
    LENGTH,
    VOCABULARY,
    Case,
    Model,
    Tokens,
    fill,
    full,
    make_optimizer,
    reference,
)
from tests.trainer.small import run_config, run_ranks
from tests.worlds import run_world


@dataclass(frozen=True)
class Cell:
    """A mesh, a plan, and what is trained. `case.world_size` counts the ranks that see different data."""

    tp: int
    plan: str
    case: Case
    loss_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.case.world_size


WORLD_2 = [
    Cell(2, "sequence", Case(accumulation=2, weighted=True, clip=0.05, tied=True)),
    Cell(2, "sequence", Case(accumulation=2, short_window=True, optimizer="adamw"), loss_parallel=True),
    Cell(2, "sequence", Case(weighted=True, tied=True, clip=0.05, sync_policy="reduce_scatter_each"), True),
    Cell(2, "layers", Case(weighted=True, clip=0.05, accumulation=2), loss_parallel=True),
    Cell(2, "layers", Case(tied=True, optimizer="adamw", accumulation=2)),
    Cell(2, "blocks", Case(tied=True, clip=0.05, weighted=True)),
    Cell(2, "sequence", Case(frozen=True, optimizer="adamw")),
]
WORLD_4 = [
    Cell(2, "sequence", Case("fsdp", 2, accumulation=2, weighted=True, clip=0.05, tied=True)),
    Cell(2, "layers", Case("fsdp", 2, clip=0.05, optimizer="adamw", accumulation=2, short_window=True), True),
    Cell(2, "blocks", Case("replicate", 2, accumulation=2, optimizer="adamw", clip=0.05)),
    # A sequence of 6 could not be split over 4 ranks, so they share layers alone.
    Cell(4, "layers", Case(accumulation=2, weighted=True, clip=0.05, tied=True), True),
]
FURTHER_4 = [
    Cell(2, "sequence", Case("replicate", 2, accumulation=2, weighted=True, clip=0.05, tied=True), True),
    Cell(2, "layers", Case("replicate", 2, weighted=True, clip=0.05, tied=True)),
    Cell(2, "blocks", Case("fsdp", 2, clip=0.05, tied=True)),
]


@dataclass(kw_only=True)
class Config(dt.DreamTrainerConfig):
    cell: Cell = field(default_factory=lambda: Cell(1, "sequence", Case()))


class Trained(dt.DreamTrainer):
    """Trains the model of the arithmetic tests, split in one of three ways."""

    config: Config

    def configure_models(self) -> None:
        # Its 11 tokens cannot be split evenly, so ranks hold unequal parts of the embedding.
        self.model = Model(self.config.cell.case)

    def init_weights(self) -> None:
        fill(self.model)

    def apply_tensor_parallel(self, mesh: Any) -> None:
        plan, wanted = self.config.cell.plan, self.config.tensor_parallel_parameters
        split(self.model, mesh, plan, loss_parallel=wanted.loss_parallel)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DistributedDataLoader(Tokens(self.config.cell.case.n_samples), BATCH, drop_last=False), None

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.config.cell.case.optimizer, self.model)
        self.losses: list[tuple[int, float]] = []
        self.norms: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        count = (targets != -100).sum()
        self.backward(loss, weight=count if self.config.cell.case.weighted else None)
        self.losses.append((self.global_step, float(full(loss.detach()))))
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}


def split(model: Model, mesh: Any, plan: str, *, loss_parallel: bool) -> None:
    """Splits all of `model` and its sequences, all but its norms, or only the matrices in its blocks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    stream = Shard(1) if plan == "sequence" else Replicate()
    if plan != "blocks":
        logits = Shard(-1) if loss_parallel else Replicate()
        head = ColwiseParallel(input_layouts=stream, output_layouts=logits, use_local_output=not loss_parallel)
        embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        parallelize_module(model, mesh, {"embedding": embedding, "head": head})
    for block in model.blocks:
        norm = {"norm": SequenceParallel()} if plan == "sequence" else {}
        matrices = {"up": ColwiseParallel(input_layouts=stream), "down": RowwiseParallel(output_layouts=stream)}
        parallelize_module(block, mesh, norm | matrices)


def config_of(cell: Cell, experiment: str = "cell", **training: Any) -> Config:
    return run_config(
        experiment,
        Config,
        group="tensor-parallel",
        device_parameters=dt.DeviceParameters(
            device="cpu", tensor_parallel=cell.tp, dp_shard=cell.case.world_size if cell.case.mode == "fsdp" else 1
        ),
        training_parameters=dt.TrainingParameters(
            **{"n_epochs": 2}
            | {"gradient_accumulation_steps": cell.case.accumulation, "gradient_clip_val": cell.case.clip}
            | {"train_batch_size": BATCH, "sync_policy": cell.case.sync_policy}
            | training
        ),
        tensor_parallel_parameters=dt.TensorParallelParameters(
            sequence_parallel=cell.plan == "sequence", loss_parallel=cell.loss_parallel
        ),
        cell=cell,
    )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def train(cells: list[Cell]) -> list[dict[str, Any]]:
    results = []
    for cell in cells:
        with Trained(config_of(cell)) as trainer:
            trainer.fit()
            model = trainer.model
            tokens = Tokens(4)[0][0].unsqueeze(0)
            outside = full(model(tokens).detach())
            with trainer.gathered(model):
                inside = full(model(tokens))
                kept = weights_of(model)
            results.append(
                {
                    "gathered": torch.equal(inside, outside),
                    "kept": kept,
                    "losses": trainer.losses,
                    "norms": trainer.norms,
                    "weights": weights_of(model),
                    "tied": model.head.weight is model.embedding.weight,
                }
            )
    return results


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(1.0, abs(b))


@pytest.mark.pitfall(15)
@pytest.mark.pitfall(20)
@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(WORLD_2, id="2 ranks"),
        pytest.param(WORLD_4, id="4 ranks"),
        pytest.param(FURTHER_4, id="4 ranks, further", marks=pytest.mark.slow),
    ],
)
def test_training_on_split_layers_equals_a_loop_written_by_hand(cells: list[Cell]) -> None:
    by_rank = run_world(train, cells[0].world_size, cells)
    for cell, ranks in zip(cells, zip(*by_rank, strict=True), strict=True):
        expected = reference(cell.case)
        losses = defaultdict(list)
        for result in ranks:
            assert result["tied"] == cell.case.tied
            assert result["gathered"]
            assert all(torch.equal(weight, result["weights"][name]) for name, weight in result["kept"].items())
            assert len(result["norms"]) == len(expected["norms"])
            assert all(map(close, result["norms"], expected["norms"])), (cell, result["norms"], expected["norms"])
            weights = {name.removeprefix("model."): weight for name, weight in expected["weights"].items()}
            assert result["weights"].keys() == weights.keys()
            for name, weight in weights.items():
                torch.testing.assert_close(result["weights"][name], weight, rtol=1e-9, atol=1e-9, msg=f"{cell}: {name}")
        for position in range(len(ranks[0]["losses"])):
            for result in ranks[:: cell.tp]:
                step, loss = result["losses"][position]
                losses[step].append(loss)
        for step, of_step in enumerate(expected["losses"]):
            assert len(losses[step]) == len(of_step)
            assert all(map(close, losses[step], of_step)), (cell, step)


# -- what is counted, and what is kept


class Observed(Trained):
    """Random weights; validates and predicts ragged data, and shows what it counts."""

    loaded: dict[str, Any] | None = None

    def init_weights(self) -> None:
        self.model.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear | nn.Embedding) else None)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return (
            DistributedDataLoader(Tokens(72), self.config.training_parameters.train_batch_size, shuffle=True),
            DistributedDataLoader(Tokens(7), 2, drop_last=False),
        )

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.initial = weights_of(self.model)

    def configure_metrics(self) -> None:
        from torchmetrics import SumMetric

        self.targets = SumMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        self.log("my/samples", float(len(batch[0])), reduce="sum")
        return result

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        count = (targets != -100).sum()
        self.targets.update(count)
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.log("loss", loss, weight=count)
        return {"one": 1.0}

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return full(self.model(batch[0]))

    def on_load(self, path: Path) -> None:
        self.loaded = state_of(self)


def state_of(trainer: Observed) -> dict[str, Tensor]:
    """Whole copies of weights and moments."""
    state = weights_of(trainer.model)
    for name, parameter in trainer.model.named_parameters():
        for key, value in trainer.optimizer.state[parameter].items():
            state[f"{key} of {name}"] = full(value).clone()
    return state


def logged(path: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    shown = ("step", "train/loss", "my/samples")
    return [{name: record[name] for name in shown} for record in records if "my/samples" in record]


MESHES = {
    "one": Cell(1, "sequence", Case(tied=True, weighted=True, optimizer="adamw")),
    "fsdp": Cell(1, "sequence", Case("fsdp", 2, tied=True, weighted=True, optimizer="adamw")),
    "tp": Cell(2, "sequence", Case(tied=True, weighted=True, optimizer="adamw"), loss_parallel=True),
    "tp x fsdp": Cell(2, "sequence", Case("fsdp", 2, tied=True, weighted=True, optimizer="adamw")),
}


def observe(mesh: str, experiment: str, directory: str, max_steps: int) -> dict[str, Any]:
    """Trains on a mesh, from a checkpoint if the experiment has one, and saves at the end."""
    os.chdir(directory)
    cell = MESHES[mesh]
    config = config_of(cell, experiment, max_steps=max_steps, train_batch_size=12 // cell.case.world_size)
    config = replace(
        config,
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",), log_every_n_steps=1),
    )
    with Observed(config) as trainer:
        trainer.fit()
        return {
            "start": trainer.initial,
            "loaded": trainer.loaded,
            "state": state_of(trainer),
            "metrics": trainer.evaluate(),
            "predictions": torch.cat(trainer.predict(DistributedDataLoader(Tokens(7), 2, drop_last=False))),
            "samples": trainer.samples_seen,
            "step": trainer.global_step,
        }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("alone")
    return directory, run_world(observe, 1, "one", "alone", str(directory), 6)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Half of the run, on four ranks."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, run_world(observe, 4, "tp x fsdp", "saved", str(directory), 3)


def test_initial_weights_are_the_same_bits_on_every_mesh(
    alone: tuple[Path, dict[str, Any]], saved: tuple[Path, list[dict[str, Any]]]
) -> None:
    for rank in saved[1]:
        for name, weight in alone[1]["start"].items():
            assert torch.equal(rank["start"][name], weight), name


@pytest.fixture(scope="module")
def resumed(
    saved: tuple[Path, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """The other half on each mesh, by its name."""
    found = {}
    for mesh in ("one", "fsdp", "tp"):
        directory = tmp_path_factory.mktemp("resumed")
        shutil.copytree(saved[0] / "runs", directory / "runs")
        found[mesh] = directory, run_world(observe, MESHES[mesh].world_size, mesh, "saved", str(directory), 6)
    return found


@pytest.mark.parametrize("mesh", ["one", "fsdp", "tp"])
def test_a_checkpoint_of_split_and_sharded_layers_resumes_on_any_mesh(
    mesh: str,
    saved: tuple[Path, list[dict[str, Any]]],
    resumed: dict[str, tuple[Path, list[dict[str, Any]]]],
    alone: tuple[Path, dict[str, Any]],
) -> None:
    for rank in resumed[mesh][1]:
        assert rank["loaded"].keys() == saved[1][0]["state"].keys()
        for name, value in saved[1][0]["state"].items():
            assert torch.equal(rank["loaded"][name], value), name
        for name, value in alone[1]["state"].items():
            torch.testing.assert_close(rank["state"][name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.pitfall(45)
@pytest.mark.parametrize("mesh", ["one", "fsdp", "tp"])
def test_ranks_that_share_layers_count_each_sample_once(
    mesh: str, resumed: dict[str, tuple[Path, list[dict[str, Any]]]], alone: tuple[Path, dict[str, Any]]
) -> None:
    directory, ranks = resumed[mesh]
    expected = alone[1]
    n_targets = float((Tokens(7).targets != -100).sum())
    for rank in ranks:
        assert (rank["samples"], rank["step"]) == (72, 6) == (expected["samples"], expected["step"])
        assert rank["metrics"]["val/targets"] == n_targets
        assert rank["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        assert rank["predictions"].shape == (7, LENGTH, VOCABULARY)
        torch.testing.assert_close(rank["predictions"], expected["predictions"], rtol=1e-9, atol=1e-9)
    by_hand = logged(alone[0] / "runs/tests/tensor-parallel/alone")
    here = logged(directory / "runs/tests/tensor-parallel/saved")
    assert [record["my/samples"] for record in here] == [12.0] * 6
    assert [record["step"] for record in here] == [1, 2, 3, 4, 5, 6]
    for record, other in zip(here, by_hand, strict=True):
        assert record == pytest.approx(other, rel=1e-9)


# -- what cannot be


def test_a_plan_that_is_missing_is_named_before_anything_runs() -> None:
    class NoPlan(dt.DreamTrainer):
        configure_models = Trained.configure_models
        configure_optimizers = Trained.configure_optimizers
        configure_dataloaders = Trained.configure_dataloaders
        training_step = Trained.training_step

    with pytest.raises(ConfigError, match="NoPlan does not override apply_tensor_parallel. Split each"):
        NoPlan(config_of(WORLD_2[0]))


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("divides nothing", "tensor_parallel=3 does not divide world_size=2. Use 1 or 2"),
        ("splits nothing", "SplitsNothing.apply_tensor_parallel split no parameter of self.model: each of the 2 ranks"),
        ("torn ties", "are tied, and the tensor-parallel plan splits them in different ways. Split both"),
    ],
)
def test_what_cannot_be_split_ends_the_run_on_all_ranks_with_what_to_do(
    mistake: str, told: str, tmp_path: Path
) -> None:
    code = f"from tests.trainer.test_tensor_parallel import make_mistake; make_mistake({mistake!r})"
    for status, text in run_ranks(code, 2, tmp_path):
        assert status == 1
        assert told in text


class TornTies(Trained):
    def apply_tensor_parallel(self, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(self.model, mesh, {"head": ColwiseParallel()})


class SplitsNothing(Trained):
    def apply_tensor_parallel(self, mesh: Any) -> None:
        pass


def make_mistake(mistake: str) -> None:
    if mistake == "divides nothing":
        Trained(config_of(replace(WORLD_2[0], tp=3))).fit()
    else:
        kind = TornTies if mistake == "torn ties" else SplitsNothing
        kind(config_of(WORLD_2[0])).fit()
