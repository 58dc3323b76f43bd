"""Tensor parallelism changes how the work is divided and nothing else: weights, counts, metrics and checkpoints."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dream_trainer as dt
from tests.api import ConfigError, HookError, start
from tests.trainer import arithmetic
from tests.trainer.arithmetic import BATCH, Case, Model, Tokens, full, reference, same_bits
from tests.trainer.small import run_config, weights as weights_of
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
    Cell(2, "layers", Case(tied=True, weighted=True, clip=0.05, accumulation=2), loss_parallel=True),
    Cell(2, "blocks", Case(tied=True, clip=0.05, weighted=True)),
    Cell(2, "sequence", Case(frozen=True, optimizer="adamw")),
]
WORLD_4 = [
    Cell(2, "sequence", Case("fsdp", 2, accumulation=2, weighted=True, clip=0.05, tied=True)),
    # A sequence of 6 could not be split over 4 ranks, so they share layers alone.
    Cell(4, "layers", Case(accumulation=2, weighted=True, clip=0.05, tied=True), True),
]


@dataclass(kw_only=True)
class Config(dt.DreamTrainerConfig):
    cell: Cell = field(default_factory=lambda: Cell(1, "sequence", Case()))

    @property
    def case(self) -> Case:
        return self.cell.case


class Trained(arithmetic.Trained, dt.DreamTrainer):
    """The parity model. Its 11 tokens cannot be split evenly, so ranks hold unequal parts of the embedding."""

    config: Config

    def apply_tensor_parallel(self, mesh: Any) -> None:
        plan, wanted = self.config.cell.plan, self.config.tensor_parallel_parameters
        split(self.model, mesh, plan, loss_parallel=wanted.loss_parallel)


def split(model: Model, mesh: Any, plan: str, *, loss_parallel: bool) -> None:
    """Splits all of `model` and its sequences, all but its norms, or only the matrices in its blocks."""
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
            | {"gradient_accumulation_steps": cell.case.accumulation, "gradient_clip_norm": cell.case.clip}
            | {"train_batch_size": BATCH, "sync_policy": cell.case.sync_policy}
            | training
        ),
        tensor_parallel_parameters=dt.TensorParallelParameters(
            sequence_parallel=cell.plan == "sequence", loss_parallel=cell.loss_parallel
        ),
        cell=cell,
    )


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
@pytest.mark.parametrize("cells", [pytest.param(WORLD_2, id="2 ranks"), pytest.param(WORLD_4, id="4 ranks")])
def test_training_on_split_layers_equals_a_loop_written_by_hand(cells: list[Cell]) -> None:
    by_rank = run_world(train, cells[0].world_size, cells)
    for cell, ranks in zip(cells, zip(*by_rank, strict=True), strict=True):
        expected = reference(cell.case)
        losses = defaultdict(list)
        for result in ranks:
            assert result["tied"] == cell.case.tied
            assert result["gathered"]
            assert same_bits(result["kept"], result["weights"])
            assert len(result["norms"]) == len(expected["norms"])
            assert all(map(close, result["norms"], expected["norms"])), (cell, result["norms"], expected["norms"])
            weights = {name.removeprefix("model."): weight for name, weight in expected["weights"].items()}
            torch.testing.assert_close(result["weights"], weights, rtol=1e-9, atol=1e-9, msg=f"{cell}: {{}}".format)
        for position in range(len(ranks[0]["losses"])):
            for result in ranks[:: cell.tp]:
                step, loss = result["losses"][position]
                losses[step].append(loss)
        for step, of_step in enumerate(expected["losses"]):
            assert len(losses[step]) == len(of_step)
            assert all(map(close, losses[step], of_step)), (cell, step)


def test_a_plan_that_is_missing_is_named_before_anything_runs() -> None:
    class NoPlan(dt.DreamTrainer):
        configure_models = Trained.configure_models
        configure_optimizers = Trained.configure_optimizers
        configure_dataloaders = Trained.configure_dataloaders
        training_step = Trained.training_step

    with pytest.raises(ConfigError, match="NoPlan does not override apply_tensor_parallel. Split each"):
        NoPlan(config_of(WORLD_2[0]))


def refused(kind: type[Trained]) -> str:
    trainer = kind(config_of(WORLD_2[0]))
    with pytest.raises((ConfigError, HookError)) as error:
        start(trainer._runtime)
    trainer.close()
    return str(error.value)


def test_what_cannot_be_split_is_refused_on_all_ranks_with_what_to_do() -> None:
    told = "SplitsNothing.apply_tensor_parallel split no parameter of self.model: each of the 2 ranks"
    assert all(told in said for said in run_world(refused, 2, SplitsNothing))
    told = "are tied, and the tensor-parallel plan splits them in different ways. Split both"
    assert all(told in said for said in run_world(refused, 2, TornTies))


class TornTies(Trained):
    def apply_tensor_parallel(self, mesh: Any) -> None:
        parallelize_module(self.model, mesh, {"head": ColwiseParallel()})


class SplitsNothing(Trained):
    def apply_tensor_parallel(self, mesh: Any) -> None:
        pass
