"""Parameters that cannot be treated like the others: scalars train on any number of ranks, the rest is refused."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import ConfigError, refuse_unsupported
from tests.trainer.small import WIDTH, Batch, fill, make_config, network, weights
from tests.trainer.test_several_models import Body, micro_batches
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


class Scales(Body, dt.CheckpointMixin):
    def configure_models(self) -> None:
        self.model = Scaled()

    def configure_optimizers(self) -> None:
        self.optimizer = adamw(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


class ShardedScales(Scales, dt.FSDPMixin):
    pass


def train(cls: type[Scales], experiment: str, accumulation: int, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    config = make_config(max_steps=steps, gradient_accumulation_steps=accumulation)
    config.experiment = experiment
    config.checkpoint_parameters = dt.CheckpointParameters(save_every_n_epochs=None)
    with cls(config) as trainer:
        trainer.fit()
        return weights(trainer.model), trainer.norms


def train_both() -> list[tuple[dict[str, Tensor], list[float]]]:
    return [train(cls, cls.__name__, 1, 3) for cls in (Scales, ShardedScales)]


@pytest.mark.pitfall(84)
def test_scalars_train_and_resume_on_another_number_of_ranks() -> None:
    model = Scaled()
    fill(model)
    optimizer, norms, states = adamw(model), [], []
    for ((*ranks,),) in [[window[0]] for window in micro_batches(2, 1)]:
        (sum(mse_loss(model(x), y) for x, y, _ in ranks) / 2).backward()
        norms.append(torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item())
        optimizer.step()
        optimizer.zero_grad()
        states.append(weights(model))
    for found in run_world(train_both, 2):
        for state, its_norms in found:
            assert its_norms == pytest.approx(norms[:3], rel=1e-11)
            for name, value in states[2].items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
    for cls in (Scales, ShardedScales):
        state, its_norms = train(cls, cls.__name__, 2, 6)
        assert its_norms == pytest.approx(norms[3:6], rel=1e-9)
        for name, value in states[5].items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


@pytest.mark.pitfall(84)
def test_sparse_gradients_are_refused_by_name_when_the_trainer_is_set_up() -> None:
    class Sparse(Scales):
        def configure_models(self) -> None:
            self.model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)})

        def init_weights(self) -> None:
            pass

    with pytest.raises(ConfigError, match=r"model\.table is built with sparse=True"):
        Sparse(make_config(max_steps=1)).fit()


@pytest.mark.pitfall(80)
def test_an_embedding_that_renormalises_in_forward_is_refused_by_name_on_several_ranks() -> None:
    models = {"model": nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))}
    refuse_unsupported(models, 1, are_wrapped=False)
    with pytest.raises(ConfigError, match=r"model\.0 is built with max_norm=1\.0"):
        refuse_unsupported(models, 2, are_wrapped=False)


class Normed(Scales):
    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.BatchNorm1d(WIDTH), network()).double()
        self.seen: list[Tensor] = []

    def pre_val_epoch(self) -> None:
        self.seen = [buffer.clone() for buffer in self.model[0].buffers()]

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}

    def configure_dataloaders(self) -> tuple[Any, Any]:
        train_loader, _ = super().configure_dataloaders()
        return train_loader, train_loader


def normed() -> list[Tensor]:
    with Normed(make_config(n_epochs=1)) as trainer:
        trainer.fit()
        return trainer.seen


@pytest.mark.pitfall(80)
def test_batch_norms_statistics_are_the_mean_over_ranks_on_every_rank() -> None:
    norms = [nn.BatchNorm1d(WIDTH).double() for _ in range(2)]
    for ((*ranks,),) in [[window[0]] for window in micro_batches(2, 1)]:
        for norm, (x, _, _) in zip(norms, ranks, strict=True):
            norm(x)
    first, second = run_world(normed, 2)
    for found, other, a, b in zip(first, second, norms[0].buffers(), norms[1].buffers(), strict=True):
        assert torch.equal(found, other)
        torch.testing.assert_close(found, a if a.dtype == torch.int64 else (a + b) / 2, rtol=0, atol=1e-12)
    assert not torch.equal(norms[0].running_mean, norms[1].running_mean)


@pytest.mark.pitfall(84)
def test_a_parameter_of_two_models_is_refused_by_name_where_they_are_wrapped() -> None:
    """Replicas, which are not, train it: tests/trainer/test_replicas.py."""
    encoder = nn.Linear(2, 2)
    models = {"actor": nn.Sequential(encoder, nn.Linear(2, 1)), "critic": nn.Sequential(encoder, nn.Linear(2, 1))}
    refuse_unsupported(models, 2, are_wrapped=False)
    with pytest.raises(ConfigError, match=r"actor\.0\.weight and critic\.0\.weight are one parameter"):
        refuse_unsupported(models, 2, are_wrapped=True)


def averaged_by_hand() -> list[list[float]]:
    from dream_trainer.distributed.world import World
    from dream_trainer.parallel.joined_buffers import JoinedBuffers

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
