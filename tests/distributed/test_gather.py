"""The gather that gradients go through, against autograd over all ranks' rows in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, normalize

import dream_trainer as dt
from tests.api import DistributedDataLoader, RanksDifferError, World
from tests.trainer.small import run_config, weights
from tests.worlds import run_world

EVEN, UNEVEN = (3, 3), (2, 5)


def rows(lengths: tuple[int, ...]) -> list[Tensor]:
    """Each rank's rows [n, 2, 3] in float64."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 2, 3, dtype=torch.float64, generator=generator) for n in lengths]


def loss_of(rank: int, own: Tensor, every: Tensor) -> Tensor:
    """Another function on each rank, of all rows."""
    return (every.sin() * (rank + 1)).square().sum() * own.exp().sum() + every.prod(0).sum()


def first_and_second(loss: Tensor, own: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the loss, and those of the sum of their squares."""
    first = torch.autograd.grad(loss, own, create_graph=True)
    return list(first), list(torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), own))


def expected(lengths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """By autograd, of the sum of all ranks' losses."""
    parts = [part.requires_grad_() for part in rows(lengths)]
    every = torch.cat(parts)
    return first_and_second(sum((loss_of(r, part, every) for r, part in enumerate(parts)), torch.zeros(())), parts)


def message_of(call: Callable[[], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def on_rank() -> dict[str, Any]:
    world = World(dt.DeviceParameters(device="cpu"), shard_by_default=False)
    found: dict[str, Any] = {}
    for lengths in (EVEN, UNEVEN):
        own = rows(lengths)[world.rank].requires_grad_()
        every = world.all_gather_with_gradient(own)
        first, second = first_and_second(loss_of(world.rank, own, every), [own])
        found[str(lengths)] = every.detach(), first[0].detach(), second[0]
    # Its gradient comes back through a transposed, not contiguous tensor.
    own = rows(EVEN)[world.rank].transpose(0, 1).requires_grad_()
    world.all_gather_with_gradient(own).transpose(0, 2).square().sum().backward()
    found["transposed"] = own.grad
    with torch.no_grad():
        found["plain"] = world.all_gather_with_gradient(torch.tensor([world.rank]))
    found["widths"] = message_of(
        lambda: world.all_gather_with_gradient(torch.ones(2, 3 + world.rank)), RanksDifferError
    )
    found["lost"] = message_of(lambda: world.all_gather(own), ValueError)
    world.forbidden = "a callback of rank 0"
    found["forbidden"] = message_of(lambda: world.all_gather_with_gradient(own), RuntimeError)
    world.forbidden = None
    world.close()
    return found


def test_gradients_of_all_ranks_losses_come_back_to_whose_rows_they_are() -> None:
    ranks = run_world(on_rank, 2)
    for rank, found in enumerate(ranks):
        for lengths in (EVEN, UNEVEN):
            every, first, second = found[str(lengths)]
            assert torch.equal(every, torch.cat(rows(lengths)))
            of_one_process = expected(lengths)
            torch.testing.assert_close(first, of_one_process[0][rank], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(second, of_one_process[1][rank], rtol=1e-12, atol=1e-12)
        # Each of two ranks squares all rows.
        assert torch.equal(found["transposed"], 4 * rows(EVEN)[rank].transpose(0, 1))
        assert found["plain"].tolist() == [0, 1]
        assert "rows of [3] in torch.float32 on rank 0" in found["widths"]
        assert "rows of [4] in torch.float32 on rank 1" in found["widths"]
        assert "world.all_gather_with_gradient(values)" in found["lost"]
        assert "a callback of rank 0" in found["forbidden"]


def test_one_process_has_its_own_rows_and_the_same_refusals() -> None:
    world = World(dt.DeviceParameters(device="cpu"), shard_by_default=False)
    own = torch.ones(2, 3, requires_grad=True)
    assert world.all_gather_with_gradient(own) is own
    with pytest.raises(ValueError, match="these values are 0-dim"):
        world.all_gather_with_gradient(own.sum())
    with pytest.raises(ValueError, match="does not pass gradients"):
        world.all_gather(own)
    with pytest.raises(ValueError, match="values on meta"):
        world.all_gather(torch.ones(2, device="meta"))


class Contrasts(dt.BaseTrainer, dt.SetupMixin, dt.FSDPMixin, dt.TensorParallelMixin):
    """Compares 21 samples with each other, in batches that ranks share unevenly, on whatever mesh."""

    def configure_models(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()

    def apply_tensor_parallel(self, mesh: Any) -> None:
        parallelize_module(self.model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.losses: list[float] = []

    def configure_dataloaders(self) -> tuple[Any, None]:
        samples = torch.randn(21, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        batch_size = 8 // self.world.dp_size
        return DistributedDataLoader(torch.utils.data.TensorDataset(samples), batch_size, drop_last=False), None

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> dict[str, Any]:
        own = normalize(self.model(batch[0]))
        every = self.world.all_gather_with_gradient(own)
        sizes = self.world.all_gather(torch.tensor([len(own)])).flatten()[:: self.world.data_copies]
        places = int(sizes[: self.world.dp_rank].sum()) + torch.arange(len(own))
        loss = cross_entropy(own @ every.T / 0.5, places)
        self.backward(loss, weight=len(own))
        self.losses.append(loss.item() * len(own))
        self.step(self.model, self.optimizer)
        return {"loss": loss}


def trained(mesh: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    devices, training = dt.DeviceParameters(device="cpu", **mesh), dt.TrainingParameters(n_epochs=2)
    with Contrasts(run_config(device_parameters=devices, training_parameters=training)) as trainer:
        trainer.fit()
        return trainer.losses, weights(trainer.model)


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ({}, 2),
        pytest.param({"dp_replicate": 2, "dp_shard": 1}, 2, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "dp_shard": 1, "tensor_parallel": 2}, 4, marks=pytest.mark.slow),
    ],
)
def test_a_contrastive_run_has_one_processs_losses_and_weights(mesh: dict[str, Any], ranks: int, tmp_path: Any) -> None:
    losses, expected_weights = trained({})
    assert len(losses) == 6
    together = run_world(trained, ranks, mesh)
    data_ranks = together[:: ranks // 2]
    sums = torch.tensor([losses_of for losses_of, _ in data_ranks], dtype=torch.float64).sum(0)
    torch.testing.assert_close(sums, torch.tensor(losses, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    for _, found in together:
        torch.testing.assert_close(found, expected_weights, rtol=1e-9, atol=1e-12)
