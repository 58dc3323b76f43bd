"""Tensor parallelism changes how the work is divided and nothing else: weights, counts, metrics and checkpoints.
Sizes that ranks cannot have equal parts of are refused by name, before PyTorch joins them."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dream_trainer as dt
from tests.api import ConfigError, EqualParts, HookError, RanksDifferError, World, start
from tests.trainer import arithmetic
from tests.trainer.arithmetic import BATCH, Case, Model, Tokens, full, reference, same_bits
from tests.trainer.small import run_config, weights as weights_of
from tests.worlds import run_each, run_world


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


def train(cell: Cell) -> dict[str, Any]:
    with Trained(config_of(cell)) as trainer:
        trainer.fit()
        model = trainer.model
        tokens = Tokens(4)[0][0].unsqueeze(0)
        outside = full(model(tokens).detach())
        with trainer.gathered(model):
            inside = full(model(tokens))
            kept = weights_of(model)
        return {
            "gathered": torch.equal(inside, outside),
            "kept": kept,
            "losses": trainer.losses,
            "norms": trainer.norms,
            "weights": weights_of(model),
            "tied": model.head.weight is model.embedding.weight,
        }


@pytest.mark.pitfall(15, 20)
@pytest.mark.parametrize("cells", [pytest.param(WORLD_2, id="2 ranks"), pytest.param(WORLD_4, id="4 ranks")])
def test_training_on_split_layers_equals_a_loop_written_by_hand(cells: list[Cell]) -> None:
    for cell, ranks in run_each(train, cells[0].world_size, cells):
        expected = reference(cell.case)
        losses = defaultdict(list)
        for result in ranks:
            assert result["tied"] == cell.case.tied
            assert result["gathered"]
            assert same_bits(result["kept"], result["weights"])
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-9, abs=1e-9), cell
            weights = {name.removeprefix("model."): weight for name, weight in expected["weights"].items()}
            torch.testing.assert_close(result["weights"], weights, rtol=1e-9, atol=1e-9, msg=f"{cell}: {{}}".format)
        for position in range(len(ranks[0]["losses"])):
            for result in ranks[:: cell.tp]:
                step, loss = result["losses"][position]
                losses[step].append(loss)
        for step, of_step in enumerate(expected["losses"]):
            assert losses[step] == pytest.approx(of_step, rel=1e-9, abs=1e-9), (cell, step)


def test_a_plan_that_is_missing_is_named_before_anything_runs() -> None:
    class NoPlan(dt.DreamTrainer):
        configure_models = Trained.configure_models
        configure_optimizers = Trained.configure_optimizers
        configure_dataloaders = Trained.configure_dataloaders
        training_step = Trained.training_step

    with pytest.raises(ConfigError, match="NoPlan does not override apply_tensor_parallel. Split each"):
        NoPlan(config_of(WORLD_2[0]))


class TornTies(Trained):
    def apply_tensor_parallel(self, mesh: Any) -> None:
        parallelize_module(self.model, mesh, {"head": ColwiseParallel()})


class SplitsNothing(Trained):
    def apply_tensor_parallel(self, mesh: Any) -> None:
        pass


REFUSED: dict[type[Trained], str] = {
    SplitsNothing: "SplitsNothing.apply_tensor_parallel split no parameter of self.model: each of the 2 ranks",
    TornTies: "are tied, and the tensor-parallel plan splits them in different ways. Split both",
}


def refused(kind: type[Trained]) -> str:
    with kind(config_of(WORLD_2[0])) as trainer, pytest.raises((ConfigError, HookError)) as error:
        start(trainer._runtime)
    return str(error.value)


def test_what_cannot_be_split_is_refused_on_all_ranks_with_what_to_do() -> None:
    for kind, errors in run_each(refused, 2, list(REFUSED)):
        assert all(REFUSED[kind] in error for error in errors)


class Layers(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


def make_mistakes() -> dict[str, Any]:
    world = World(dt.DeviceParameters(device="cpu", tensor_parallel=2), shard_by_default=False)
    told: dict[str, Any] = {}
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    whole = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    for name, model, x in [
        ("fits", Layers(), whole),
        ("hidden", Layers(hidden=5), whole),
        ("length", Layers(), whole[:, : 4 - world.rank]),
    ]:
        parallelize_module(model, world.mesh["tp"], plan)
        try:
            with EqualParts({"model": model}, world).compared():
                model(x)
        except RanksDifferError as error:
            told[name] = str(error)
        assert not model._forward_pre_hooks, name
    world.close()
    return told


def test_parts_that_are_not_equal_are_refused_on_all_ranks_with_what_fits() -> None:
    for told in run_world(make_mistakes, 2):
        assert told.keys() == {"hidden", "length"}
        assert told["hidden"].startswith(
            "model.down is given parts of unequal sizes on the tensor_parallel=2 ranks: [[2, 6, 3]], "
        )
        assert "[[2, 6, 2]]. A plan cuts into equal parts" in told["hidden"]
        assert "that are multiples of 2." in told["hidden"]
        assert told["length"].startswith(
            "model is given parts of unequal sizes on the tensor_parallel=2 ranks: [[2, 4, 8]], [[2, 3"
        )
