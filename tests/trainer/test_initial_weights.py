"""Initial weights, buffers and ties are the same bits through the trainer on every world size and layout."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.meta.families import FAMILIES
from tests.trainer import small
from tests.trainer.arithmetic import full
from tests.worlds import run_world

LAYOUTS: dict[str, Callable[[], dt.DeviceParameters]] = {
    "replicate": lambda: dt.DeviceParameters(device="cpu", dp_shard=1),
    "fsdp": lambda: dt.DeviceParameters(device="cpu", dp_replicate=1),
    "hsdp of 2": lambda: dt.DeviceParameters(device="cpu", dp_shard=2),
    "hsdp of 4": lambda: dt.DeviceParameters(device="cpu", dp_shard=4),
}
# What cannot be sharded (a scalar parameter, several dtypes in one group) is left to tests/meta.
TOGETHER = ["every_init", "nano_gpt", "embedding", "late"]
FURTHER = ["conv", "batch_norm", "attention", "encoder", "orthogonal", "flat"]


@dataclass
class Config(small.Config):
    families: tuple[str, ...] = ()


class Replicated(dt.BaseTrainer, dt.SetupMixin):
    """Builds its models and trains none of them."""

    config: Config

    def configure_models(self) -> None:
        self.models = nn.ModuleDict({name: FAMILIES[name]() for name in self.config.families})

    def configure_dataloaders(self) -> tuple[Any, None]:
        return torch.utils.data.DataLoader(torch.zeros(64, 1), 1), None

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.models.parameters(), lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        raise AssertionError("max_steps=0 trains nothing")


def build(layout: str, families: list[str], seed: int = 42) -> Replicated:
    """A trainer whose setup is done, the global generators in any state before it."""
    torch.seed()
    training, devices = dt.TrainingParameters(max_steps=0), LAYOUTS[layout]()
    parameters = {"training_parameters": training, "device_parameters": devices}
    config = small.run_config(layout, Config, seed=seed, families=tuple(families), **parameters)
    trainer = (Replicated if layout == "replicate" else small.sharded(Replicated))(config)
    trainer.fit()
    return trainer


def digests(trainer: Replicated) -> dict[str, str]:
    """A short text for the bits of each parameter and buffer as a whole tensor, ties by each of their names."""
    found = dict(trainer.models.named_parameters(remove_duplicate=False)) | dict(trainer.models.named_buffers())
    whole = {name: full(tensor).detach() for name, tensor in found.items()}
    bits = {name: value.reshape(-1).contiguous().view(torch.uint8) for name, value in whole.items()}
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in bits.items()}


def build_on_rank(layouts: list[str], families: list[str]) -> list[tuple[dict[str, str], int, bool]]:
    """For each layout: the bits, how many parameters are really sharded, and whether the ties hold."""
    from torch.distributed.tensor import DTensor

    results = []
    for layout in layouts:
        trainer = build(layout, families)
        parameters = list(trainer.models.parameters())
        sharded = sum(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in parameters)
        gpt = trainer.models["nano_gpt"]
        results.append((digests(trainer), sharded, gpt.head.weight is gpt.wte.weight))
        trainer.close()
    return results


@pytest.mark.pitfall(21)
@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 8))])
def test_replicas_and_shards_start_with_the_bits_of_one_process(world_size: int, all_cases: bool) -> None:
    families = TOGETHER + (FURTHER if all_cases else [])
    layouts = list(LAYOUTS)[: {4: 3, 8: 4}.get(world_size, 2)]  # as far as they divide the ranks
    with build("replicate", families) as trainer:
        expected = digests(trainer)
    for ranks in run_world(build_on_rank, world_size, layouts, families):
        for layout, (found, sharded, tied) in zip(layouts, ranks, strict=True):
            assert found == expected, layout
            assert tied
            assert (sharded > 0) == (layout != "replicate")


def test_another_seed_starts_with_other_weights() -> None:
    with build("replicate", ["nano_gpt"]) as one, build("replicate", ["nano_gpt"], seed=43) as two:
        assert digests(one)["nano_gpt.wte.weight"] != digests(two)["nano_gpt.wte.weight"]
