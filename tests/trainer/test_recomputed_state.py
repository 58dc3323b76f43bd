"""Modules that keep more than parameters train as by hand on every mesh: blocks whose forwards change state, under
activation checkpointing, and recurrent ones, which keep their parameters a second time in a list."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from tests.api import DistributedDataLoader, StepError, load_weights
from tests.trainer.arithmetic import full
from tests.trainer.small import FromSeed, assert_same_weights, fit_each, run_config, sgd, train_by_hand, weights
from tests.worlds import run_world

WIDTH, N_STEPS, BATCH, LAST = 4, 3, 4, 5


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


class Trained(FromSeed):
    make_model = staticmethod(lambda: Net().double())

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


class Reader(nn.Module):
    """One of each kind; those of `blocks` are blocks of their own when the model is sharded, the others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.LSTM(WIDTH, 6, num_layers=2, batch_first=True, bidirectional=True, proj_size=WIDTH // 2)
            for _ in range(2)
        )
        self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.rnn = nn.RNN(WIDTH, 3, batch_first=True, bias=False, nonlinearity="relu", bidirectional=True)
        self.head = nn.Linear(6, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)[0]
        return self.head(self.rnn(self.gru(x)[0])[0]).mean((1, 2))


def sequences() -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return x, 10 * x.sum((1, 2))


def slow_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Recurrent(FromSeed):
    """Every step sees all samples, so that it is the same step at any number of ranks."""

    make_model = Reader

    def configure_optimizers(self) -> None:
        self.first = weights(self.model)
        super().configure_optimizers()

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DataLoader(TensorDataset(*sequences()), batch_size=BATCH // self.world.world_size), None


@torch.no_grad()
def flatten_on_cpu(module: nn.RNNBase) -> None:
    """What `flatten_parameters` does on CUDA: the weights move into one piece of memory."""
    tensors = list(module.parameters(recurse=False))
    if all(type(tensor) is nn.Parameter and not tensor.is_meta for tensor in tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.set_(piece.view_as(tensor))


def run(directory: str, **devices: Any) -> dict[str, Any]:
    os.chdir(directory)
    config = run_config(
        device_parameters=dt.DeviceParameters(device="cpu", **devices),
        training_parameters=dt.TrainingParameters(max_steps=N_STEPS),
        checkpoint_parameters=dt.CheckpointParameters(),
    )
    with Recurrent(config, make_optimizer=slow_sgd) as trainer:
        trainer.fit()
        first, saved = trainer.first, weights(trainer.model)
    longer = replace(config, training_parameters=dt.TrainingParameters(max_steps=LAST))
    with Recurrent(longer, make_optimizer=slow_sgd) as trainer:
        trainer.fit()
        with trainer.gathered(trainer.model):
            answer = trainer.model(sequences()[0])
        return {"first": first, "saved": saved, "end": weights(trainer.model), "answer": answer}


def run_both(replicated: str, sharded: str) -> list[dict[str, Any]]:
    nn.RNNBase.flatten_parameters = flatten_on_cpu
    return [run(replicated, dp_replicate=2), run(sharded, dp_shard=2)]


def check(found: dict[str, Any]) -> None:
    model = Reader()
    model.load_state_dict(found["first"])
    optimizer = slow_sgd(model)
    train_by_hand(model, optimizer, [[sequences()]] * N_STEPS)
    assert_same_weights(found["saved"], model)
    train_by_hand(model, optimizer, [[sequences()]] * (LAST - N_STEPS))
    assert_same_weights(found["end"], model)
    assert not torch.equal(found["end"]["rnn.weight_ih_l0"], found["first"]["rnn.weight_ih_l0"])
    torch.testing.assert_close(found["answer"], model(sequences()[0]).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.pitfall(21)
def test_recurrent_modules_train_as_by_hand_on_any_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [tmp_path / name for name in ("alone", "replicated", "sharded")]
    for directory in directories:
        directory.mkdir()
    ranks = run_world(run_both, 2, str(directories[1]), str(directories[2]))
    monkeypatch.chdir(directories[0])
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten_on_cpu)
    alone = run(str(directories[0]))
    for found in (alone, *ranks[1]):
        check(found)
        assert all(torch.equal(value, alone["first"][name]) for name, value in found["first"].items())
