"""Recurrent modules, which keep their parameters a second time in a list: built, sharded, trained and saved."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.trainer.small import Built, assert_same_weights, run_config, train_by_hand, weights
from tests.worlds import run_world

WIDTH, SAMPLES, SAVED_AT, LAST = 4, 4, 3, 5


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


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, WIDTH, dtype=torch.float64, generator=generator)
    return x, 10 * x.sum((1, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Trained(Built, dt.DreamTrainer):
    """Every step sees all samples, so that it is the same step at any number of ranks."""

    make_model = Reader
    init_weights = dt.DreamTrainer.init_weights

    def configure_optimizers(self) -> None:
        self.first = weights(self.model)
        super().configure_optimizers()

    def configure_dataloaders(self) -> tuple[Any, None]:
        size = SAMPLES // self.world.world_size
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=size), None


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
        training_parameters=dt.TrainingParameters(max_steps=SAVED_AT),
        checkpoint_parameters=dt.CheckpointParameters(),
    )
    with Trained(config, make_optimizer=sgd) as trainer:
        trainer.fit()
        first, saved = trainer.first, weights(trainer.model)
    with Trained(
        replace(config, training_parameters=dt.TrainingParameters(max_steps=LAST)), make_optimizer=sgd
    ) as trainer:
        trainer.fit()
        with trainer.gathered(trainer.model):
            answer = trainer.model(data()[0])
        return {"first": first, "saved": saved, "end": weights(trainer.model), "answer": answer}


def run_both(replicated: str, sharded: str) -> list[dict[str, Any]]:
    nn.RNNBase.flatten_parameters = flatten_on_cpu
    return [run(replicated, dp_replicate=2), run(sharded, dp_shard=2)]


def check(found: dict[str, Any]) -> None:
    model = Reader()
    model.load_state_dict(found["first"])
    optimizer = sgd(model)
    train_by_hand(model, optimizer, [[data()]] * SAVED_AT)
    assert_same_weights(found["saved"], model)
    train_by_hand(model, optimizer, [[data()]] * (LAST - SAVED_AT))
    assert_same_weights(found["end"], model)
    assert not torch.equal(found["end"]["rnn.weight_ih_l0"], found["first"]["rnn.weight_ih_l0"])
    torch.testing.assert_close(found["answer"], model(data()[0]).detach(), rtol=1e-12, atol=1e-12)


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
