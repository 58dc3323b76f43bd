"""ModelSummary and TrainerSummary: true numbers, on one rank, and nothing ends."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

import dream_trainer as dt
from tests.api import ModelSummary, TrainerSummary, forward_flops
from tests.trainer.small import Sharded, fit, make_config
from tests.worlds import run_world


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.body[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


class Trainer(Sharded):
    make_model = staticmethod(Tied)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD((p for p in self.model.parameters() if p.requires_grad), lr=0.1)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return torch.utils.data.DataLoader(torch.arange(80).reshape(40, 2) % 10, batch_size=2), None

    def loss_of(self, batch: Any) -> torch.Tensor:
        return self.model(batch).square().mean()


def trained(*callbacks: dt.Callback, cls: type[Trainer] = Trainer, **training: Any) -> Trainer:
    return fit(cls(make_config(callbacks=callbacks, **training)))


def summaries() -> str:
    file = io.StringIO()
    limits = {"max_steps": 3, "n_epochs": 2, "gradient_accumulation_steps": 5}
    assert trained(ModelSummary(file=file), TrainerSummary(file=file), **limits).global_step == 3
    return file.getvalue()


def test_summaries_tell_parameters_and_batch_arithmetic() -> None:
    text = summaries()
    # 10x4 tied, 4x8+8 frozen, 8x4+4.
    assert "model: 116 parameters, 76 trainable, 464 B" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["body"][1:4] == ["Sequential", "76", "36"]
    assert rows["head"][1:] == ["Linear", "40", "all", "weight", "10x4", "float32", "160", "B"]
    assert "10 samples = 2 micro-batch x 5 accumulated x 1 data-parallel" in text
    assert "n_epochs=2, max_steps=3" in text
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert {"total steps 3", "steps per pass over the data 4", "validation none"} <= lines
    assert "\x1b" not in text


def on_a_rank(directory: str) -> str:
    os.chdir(directory)
    with contextlib.redirect_stdout(io.StringIO()):
        return summaries()


def test_sharded_models_are_shown_whole_with_this_ranks_share(tmp_path: Path) -> None:
    first, second = run_world(on_a_rank, 2, str(tmp_path))
    assert "model: 116 parameters, 76 trainable, 464 B, 232 B on this rank" in first
    assert "weight 10x4" in first
    assert "Tied" in first
    assert "FSDP" not in first
    assert "dp_shard 2" in first
    assert "20 samples = 2 micro-batch x 5 accumulated x 2 data-parallel" in first
    assert second == ""


def test_flops_of_a_forward_are_those_of_its_products_and_nothing_is_computed() -> None:
    file = io.StringIO()
    tokens = torch.zeros(3, 5, dtype=torch.int64)
    summary = ModelSummary(inputs={"model": (tokens,)}, file=file)
    trained(summary, max_steps=1)
    # 15 tokens through 4 x 8, 8 x 4 and 4 x 10.
    assert forward_flops(Tied(), (tokens,)) == 15 * 2 * (32 + 32 + 40)
    assert ", 3.12 K FLOPs per forward" in file.getvalue()

    class Shorter(Trainer):
        make_model = staticmethod(lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8)))

    trained(summary, cls=Shorter, max_steps=1)
    assert ", 960 FLOPs per forward" in file.getvalue()
    dropout = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    state, random = {k: v.clone() for k, v in dropout.state_dict().items()}, torch.get_rng_state()
    assert forward_flops(dropout, (torch.ones(2, 4),)) == 0
    assert all(torch.equal(state[name], tensor) for name, tensor in dropout.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
