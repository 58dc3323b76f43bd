"""Parameters that cannot be treated like the others: scalars train on any number of ranks, the rest is refused."""

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.api import ConfigError, DistributedDataLoader, JoinedBuffers, World, refuse_unsupported
from tests.trainer.small import (
    BY_BLOCKS,
    Samples,
    Spread,
    fill,
    make_config,
    network,
    sharded,
    train_by_hand,
    weights,
    windows,
)
from tests.worlds import run_world


class Scaled(nn.Module):
    """A temperature without a dimension, as CLIP has it, at the root and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.body[0][1].scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.logit_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.body[0][1].scale) * self.logit_scale.exp()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


class Scales(Spread, dt.CheckpointMixin):
    make_model = Scaled


LAYOUTS = ("replicas", "whole in steps", "blocks")


def train(layout: str, accumulation: int, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    training = {"max_steps": steps, "gradient_accumulation_steps": accumulation}
    checkpoint = dt.CheckpointParameters(save_every_n_epochs=None)
    fsdp = BY_BLOCKS if layout == "blocks" else None
    config = make_config(experiment=layout, checkpoint=checkpoint, fsdp=fsdp, **training)
    cls = Scales if layout == "replicas" else sharded(Scales)
    with cls(config, DistributedDataLoader(Samples(24), 2), make_optimizer=adamw) as trainer:
        trainer.fit()
        return weights(trainer.model), trainer.norms


def train_all() -> list[tuple[dict[str, Tensor], list[float]]]:
    return [train(layout, 1, 3) for layout in LAYOUTS]


@pytest.mark.pitfall(84)
def test_scalars_train_and_resume_on_another_number_of_ranks() -> None:
    model = Scaled()
    fill(model)
    optimizer, norms, states = adamw(model), [], []
    for window in windows(24, 2, 2):
        norms += train_by_hand(model, optimizer, [window])
        states.append(weights(model))
    for found in run_world(train_all, 2):
        for state, its_norms in found:
            assert its_norms == pytest.approx(norms[:3], rel=1e-11)
            torch.testing.assert_close(state, states[2], rtol=0, atol=1e-12)
    for layout in LAYOUTS:
        state, its_norms = train(layout, 2, 6)
        assert its_norms == pytest.approx(norms[3:6], rel=1e-9)
        torch.testing.assert_close(state, states[5], rtol=0, atol=1e-10)


@pytest.mark.pitfall(84)
def test_sparse_gradients_are_refused_by_name_when_the_trainer_is_set_up() -> None:
    class Sparse(Scales):
        make_model = staticmethod(lambda: nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)}))

    with pytest.raises(ConfigError, match=r"model\.table is built with sparse=True"):
        Sparse(make_config(max_steps=1)).fit()


@pytest.mark.pitfall(80)
def test_an_embedding_that_renormalises_in_forward_is_refused_by_name_on_several_ranks() -> None:
    models = {"model": nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))}
    refuse_unsupported(models, 1, are_wrapped=False)
    with pytest.raises(ConfigError, match=r"model\.0 is built with max_norm=1\.0"):
        refuse_unsupported(models, 2, are_wrapped=False)


@pytest.mark.pitfall(84)
def test_a_parameter_of_two_models_is_refused_by_name_where_they_are_wrapped() -> None:
    """Replicas, which are not, train it: tests/trainer/test_replicas.py."""
    encoder = nn.Linear(2, 2)
    models = {"actor": nn.Sequential(encoder, nn.Linear(2, 1)), "critic": nn.Sequential(encoder, nn.Linear(2, 1))}
    refuse_unsupported(models, 2, are_wrapped=False)
    with pytest.raises(ConfigError, match=r"actor\.0\.weight and critic\.0\.weight are one parameter"):
        refuse_unsupported(models, 2, are_wrapped=True)


def averaged_by_hand() -> list[list[float]]:
    world = World(dt.DeviceParameters(device="cpu"), shard_by_default=False)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3), nn.BatchNorm1d(2)).double()
    for index, norm in enumerate(model):
        norm.running_mean.fill_(10 * index + world.rank)
    model[1].train(world.rank == 0)  # frozen on one rank
    model[2].eval()
    JoinedBuffers({"model": model}, {}).join(world, world.averaging_group())
    found = [norm.running_mean.tolist() for norm in model]
    world.close()
    return found


@pytest.mark.pitfall(80)
def test_statistics_of_a_layer_that_only_some_ranks_train_are_those_ranks() -> None:
    first, second = run_world(averaged_by_hand, 2)
    assert first == [[0.5] * 2, [10.0] * 3, [20.0] * 2]
    assert second == [[0.5] * 2, [10.0] * 3, [21.0] * 2]
