"""Forwards that ranks do not run alike: generation under sharding, in a validation step."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from tests.trainer.small import make_config
from tests.worlds import run_world

VOCABULARY, LONGEST = 12, 40


class Model(nn.Module):
    """Tokens to logits; what it generates ends where token 0 comes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def generate(self, prompt: Tensor) -> Tensor:
        while prompt[-1] != 0 and len(prompt) < LONGEST:
            prompt = torch.cat((prompt, self(prompt)[-1:].argmax(-1)))
        return prompt


class Trainer(dt.BaseTrainer, dt.SetupMixin, dt.FSDPMixin, dt.EvalMixin):
    def configure_models(self) -> None:
        self.model = Model().double()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.texts: dict[int, list[list[int]]] = {}

    def configure_dataloaders(self) -> tuple[Any, Any]:
        data = torch.arange(VOCABULARY).repeat(4).view(-1, 1)
        size = self.config.training_parameters.train_batch_size
        return torch.utils.data.DataLoader(data, batch_size=size), torch.utils.data.DataLoader(data[1:8], batch_size=1)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        # 3 leads to 6, 9 and 0; from other tokens it goes round in circles.
        loss = F.cross_entropy(self.model(batch).flatten(0, 1), (batch.flatten() * 5 + 3) % VOCABULARY)
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        with self.gathered(self.model):
            text = self.model.generate(batch[0])
        if not self.is_padding_batch:
            self.texts.setdefault(self.global_step, []).append(text.tolist())
        return {"length": float(len(text)), "loss": self.model(batch).square().mean()}

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics


def texts() -> tuple[dict[int, list[list[int]]], dict[str, Tensor], dict[str, float]]:
    config = make_config(n_epochs=6, train_batch_size=4, val_every_n_steps=36, val_every_n_epochs=None)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parameters = replace(config.training_parameters, train_batch_size=4 // ranks)
    with Trainer(replace(config, training_parameters=parameters)) as trainer:
        trainer.fit()
        with trainer.gathered(trainer.model):
            weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        return trainer.texts, weights, trainer.metrics


def test_ranks_generate_texts_of_different_lengths_and_training_goes_on_as_on_one() -> None:
    ((alone, weights, metrics),) = run_world(texts, 1)
    ranks = run_world(texts, 2)
    assert sorted(len(text) for text in alone[72]) == [3, 4, *[LONGEST] * 5]
    for step, written in alone.items():
        assert [ranks[index % 2][0][step][index // 2] for index in range(7)] == written
    for _, found, exact in ranks:
        assert all(type(weight) is Tensor for weight in found.values())
        assert all(torch.allclose(found[name], weight, atol=1e-12, rtol=0) for name, weight in weights.items())
        assert exact["val/length"] == metrics["val/length"]
