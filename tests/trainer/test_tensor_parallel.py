"""Tensor parallelism changes how the work is divided and nothing else: weights, counts, metrics and checkpoints.
Sizes that ranks cannot have equal parts of are refused by name, before PyTorch joins them."""

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
from tests.trainer.arithmetic import Case, Model, Tokens, assert_as_by_hand, config_of, full, run_trainer, same_bits
from tests.trainer.small import weights
from tests.worlds import run_each, run_world

WORLD_2 = [
    Case(tp=2, accumulation=2, weighted=True, clip=0.05, tied=True),
    Case(tp=2, accumulation=2, short_window=True, optimizer="adamw", loss_parallel=True),
    Case(tp=2, weighted=True, tied=True, clip=0.05, sync_policy="reduce_scatter_each", loss_parallel=True),
    Case(tp=2, plan="layers", tied=True, weighted=True, clip=0.05, accumulation=2, loss_parallel=True),
    Case(tp=2, plan="blocks", tied=True, clip=0.05, weighted=True),
    Case(tp=2, frozen=True, optimizer="adamw"),
]
WORLD_4 = [
    Case("fsdp", 2, tp=2, accumulation=2, weighted=True, clip=0.05, tied=True),
    # A sequence of 6 could not be split over 4 ranks, so they share layers alone.
    Case(tp=4, plan="layers", accumulation=2, weighted=True, clip=0.05, tied=True, loss_parallel=True),
]


class Trained(arithmetic.Trained, dt.DreamTrainer):
    """The parity model. Its 11 tokens cannot be split evenly, so ranks hold unequal parts of the embedding."""

    def apply_tensor_parallel(self, mesh: Any) -> None:
        split(self.model, mesh, self.config.case)


def split(model: Model, mesh: Any, case: Case) -> None:
    """Splits all of `model` and its sequences, all but its norms, or only the matrices in its blocks."""
    stream = Shard(1) if case.plan == "sequence" else Replicate()
    if case.plan != "blocks":
        logits = Shard(-1) if case.loss_parallel else Replicate()
        head = ColwiseParallel(input_layouts=stream, output_layouts=logits, use_local_output=not case.loss_parallel)
        embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        parallelize_module(model, mesh, {"embedding": embedding, "head": head})
    for block in model.blocks:
        norm = {"norm": SequenceParallel()} if case.plan == "sequence" else {}
        matrices = {"up": ColwiseParallel(input_layouts=stream), "down": RowwiseParallel(output_layouts=stream)}
        parallelize_module(block, mesh, norm | matrices)


def look(trainer: Trained) -> dict[str, Any]:
    model, tokens = trainer.model, Tokens(4)[0][0].unsqueeze(0)
    outside = full(model(tokens).detach())
    with trainer.gathered(model):
        inside, kept = full(model(tokens)), weights(model)
    return {"gathered": torch.equal(inside, outside), "kept": kept, "tied": model.head.weight is model.embedding.weight}


def train(case: Case) -> dict[str, Any]:
    return run_trainer(case, Trained, look)


@pytest.mark.pitfall(15, 20)
@pytest.mark.parametrize("cases", [pytest.param(WORLD_2, id="2 ranks"), pytest.param(WORLD_4, id="4 ranks")])
def test_training_on_split_layers_equals_a_loop_written_by_hand(cases: list[Case]) -> None:
    for case, ranks in run_each(train, cases[0].tp * cases[0].world_size, cases):
        assert_as_by_hand(case, ranks, tolerance=1e-9)
        for result in ranks:
            assert result["tied"] == case.tied
            assert result["gathered"]
            assert same_bits(result["kept"], result["weights"])


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


HEAD = 4


class Attention(nn.Module):
    """Counts its heads from the tensor, which may have a half of one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, heads * HEAD), nn.Linear(heads * HEAD, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.query(x).view(*x.shape[:2], -1, HEAD).flatten(2))


class Layers(nn.Module):
    def __init__(self, hidden: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention(8, heads)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.up(self.norm(x)))


def make_mistakes() -> dict[str, Any]:
    world = World(dt.DeviceParameters(device="cpu", tensor_parallel=2), shard_by_default=False)
    told: dict[str, Any] = {}
    plan = {"attention.query": ColwiseParallel(), "attention.out": RowwiseParallel()}
    plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    whole = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    for name, model, x in [
        ("fits", Layers(), whole),
        ("hidden", Layers(hidden=5), whole),
        ("heads", Layers(heads=3), whole),
        ("length", Layers(), whole[:, : 4 - world.rank]),
    ]:
        parallelize_module(model, world.mesh["tp"], plan)
        try:
            with EqualParts({"model": model}, world).compared():
                model(x)
        except (RanksDifferError, RuntimeError) as error:
            told[name] = (type(error), str(error), error.__notes__ if isinstance(error, RuntimeError) else [])
        assert not any(module._forward_pre_hooks for module in (model, model.attention)), name
    world.close()
    return told


def test_parts_that_are_not_equal_are_refused_on_all_ranks_with_what_fits() -> None:
    for told in run_world(make_mistakes, 2):
        assert told.keys() == {"hidden", "heads", "length"}
        kind, message, _ = told["hidden"]
        assert kind is RanksDifferError
        assert message.startswith(
            "model.down is given parts of unequal sizes on the tensor_parallel=2 ranks: [[2, 6, 3]], "
        )
        assert "[[2, 6, 2]]. A plan cuts into equal parts" in message
        assert "that are multiples of 2." in message
        _, message, _ = told["length"]
        assert message.startswith(
            "model is given parts of unequal sizes on the tensor_parallel=2 ranks: [[2, 4, 8]], [[2, 3"
        )
        kind, _, (note,) = told["heads"]
        assert kind is RuntimeError
        assert "Under tensor_parallel=2 each rank has a part of model.attention.query, which ran last." in note
        assert "Parts have to be whole heads, of a number that 2 divides" in note
