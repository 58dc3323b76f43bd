"""Blocks whose forwards change state train under activation checkpointing as a plain loop does, on every mesh."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import TensorDataset

import dream_trainer as dt
from tests.api import DistributedDataLoader, StepError, load_weights
from tests.trainer.arithmetic import full
from tests.trainer.small import Built, fit_each, run_config, sgd, train_by_hand
from tests.worlds import run_world

WIDTH, N_STEPS, BATCH = 4, 3, 4


class Counts(nn.Module):
    """Multiplies with how often it ran: in a number of its own, and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("times", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.times.data.add_(1)
        return torch.tanh(self.up(x) * self.times.clone() / self.calls**0.5)


class Spectral(nn.Module):
    """`spectral_norm` of the new and of the old kind, whose vectors move in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.old = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.old(torch.tanh(self.new(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Spectral(), Spectral()])
        self.counts = nn.ModuleList([Counts(), Counts()])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.counts):
            x = block(x)
        return x


def initial() -> Net:
    torch.manual_seed(0)
    return Net().double()


def samples() -> tuple[Tensor, Tensor]:
    x = torch.randn(2 * N_STEPS * BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, x.roll(1, -1)


class Trained(Built, dt.DreamTrainer):
    make_model = staticmethod(lambda: Net().double())
    init_weights = dt.DreamTrainer.init_weights

    def load_pretrained(self) -> None:
        torch.save(initial().state_dict(), f"{self.world.rank}.pt")
        load_weights(self.model, f"{self.world.rank}.pt")

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [*model.blocks, *model.counts]

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DistributedDataLoader(TensorDataset(*samples()), BATCH // self.world.world_size, shuffle=False), None


def config_of(mode: str, **devices: Any) -> dt.DreamTrainerConfig:
    return run_config(
        f"{mode} {len(devices)}",
        device_parameters=dt.DeviceParameters(device="cpu", activation_checkpointing=mode, **devices),
        training_parameters=dt.TrainingParameters(max_steps=N_STEPS, gradient_accumulation_steps=2),
    )


def by_hand() -> dict[str, Tensor]:
    model = initial()
    x, y = samples()
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    train_by_hand(model, sgd(model), [batches[2 * step : 2 * step + 2] for step in range(N_STEPS)])
    return model.state_dict()


def observe(layouts: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    configs = (config_of(mode, **devices) for devices in layouts for mode in ("full", "selective"))
    return fit_each(
        map(Trained, configs),
        lambda trainer: {name: full(value.detach()).clone() for name, value in trainer.model.state_dict().items()},
    )


@pytest.mark.pitfall(92)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_state_that_forwards_change_moves_once_on_every_mesh(n_ranks: int) -> None:
    expected = by_hand()
    layouts = [{}] if n_ranks == 1 else [{}, {"dp_shard": 1}]
    for runs in run_world(observe, n_ranks, layouts):
        assert len(runs) == 2 * len(layouts)
        for found in runs:
            torch.testing.assert_close(found, dict(expected), rtol=0, atol=1e-10)


def test_a_compiled_block_that_writes_into_a_buffer_it_reads_is_an_error() -> None:
    class Compiled(Trained):
        def model_blocks(self, model: nn.Module) -> list[nn.Module]:
            return list(model.counts)

    config = config_of("full", compile=True)
    config.compile_parameters = type(config.compile_parameters)(backend="aot_eager")
    trainer = Compiled(config)
    with pytest.raises(StepError, match=r"Counts writes into 'times' .*compile=False"):
        trainer.fit()
    assert trainer.global_step == 0
