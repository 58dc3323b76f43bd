"""What expert parallelism cannot do is named, on all ranks, before the first step."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.api import ConfigError, GatedExperts, HookError, MoE, resolve_mesh, shape_among_data, split_experts
from tests.trainer.mixtures import VOCABULARY, WIDTH, Case, Trained, config_of, split_dense_layers
from tests.trainer.small import run_ranks


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class WithoutExperts(Trained):
    def configure_models(self) -> None:
        self.model = Dense()


TWO: Any = SimpleNamespace(size=lambda: 2)  # a mesh of two ranks


def test_experts_that_ranks_cannot_share_evenly_are_named() -> None:
    with pytest.raises(ConfigError, match=r"gate has shape \[3, 12, 8\], and expert_parallel=2 ranks cannot share its"):
        split_experts(GatedExperts(3, 8, 12), TWO)
    with pytest.raises(ConfigError, match="MoE has no direct parameters to share by experts"):
        split_experts(MoE(8, 12, 4, 2), TWO)


def test_a_model_without_mixtures_is_named() -> None:
    trainer = WithoutExperts(config_of(Case(2, ep=2)))
    trainer.configure_models()
    with pytest.raises(HookError, match=r"no model of WithoutExperts has a layer of dream_trainer\.modules\.MoE"):
        trainer.apply_expert_parallel(TWO)


class InParts(Trained):
    """Gives its mixtures the parts of sequences that ranks have."""

    def apply_tensor_parallel(self, mesh: Any) -> None:
        split_dense_layers(self.model, mesh, in_sequence=True, whole_inside=False)


MISTAKES = {
    "parts of sequences": "self.model computes other gradients than one process: ",
    "graphs": "fullgraph=True with expert_parallel=2 is not supported: experts that ranks share are not",
    "differ": "Use the same device_parameters on every rank",
}


def make_mistake(mistake: str) -> None:
    if mistake == "parts of sequences":
        InParts(config_of(Case(2, tp=2, sequence=True, recompute="full"))).fit()
    if mistake == "graphs":
        whole = dt.CompileParameters(backend="eager", fullgraph=True)
        Trained(replace(config_of(Case(2, ep=2, backend="aot_eager")), compile_parameters=whole)).fit()
    Trained(config_of(Case(2, ep=1 + int(os.environ["RANK"])))).fit()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_ends_the_run_on_all_ranks(mistake: str, tmp_path: Path) -> None:
    code = f"from tests.trainer.test_expert_mistakes import make_mistake; make_mistake({mistake!r})"
    for status, text in run_ranks(code, 2, tmp_path):
        assert status == 1
        assert MISTAKES[mistake] in text


@pytest.mark.parametrize(
    ("replicate", "shard", "experts", "expected"), [(4, 1, 2, (2, 1, 2)), (1, 8, 2, (1, 4, 2)), (2, 4, 4, (2, 1, 4))]
)
def test_experts_share_with_shards(replicate: int, shard: int, experts: int, expected: tuple[int, int, int]) -> None:
    assert shape_among_data(replicate, shard, experts) == expected
    devices = dt.DeviceParameters(dp_replicate=replicate, dp_shard=shard, expert_parallel=experts)
    resolve_mesh(devices, replicate * shard, shard_by_default=True)
    with pytest.raises(ConfigError, match=r"expert_parallel=3 does not divide the \d ranks of dp_"):
        resolve_mesh(replace(devices, expert_parallel=3), replicate * shard, shard_by_default=True)
