"""Activation checkpointing computes again what it did not keep: the same bits, names and copies, with less kept."""

import copy
import os
from collections import Counter
from typing import Any, Literal

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from tests.api import ConfigError, Recomputed, fsdp_modules, repeated_blocks
from tests.operations import Operations
from tests.trainer.arithmetic import full
from tests.trainer.small import run_config
from tests.trainer.test_compile import N_BLOCKS, WIDTH, Net, Trained
from tests.worlds import run_world

Mode = Literal["none", "full", "selective"]


def config_of(mode: Mode, **parameters: Any) -> dt.DreamTrainerConfig:
    return run_config(
        mode,
        fsdp_parameters=dt.FSDPParameters(min_group_mib=0),
        device_parameters=dt.DeviceParameters(device="cpu", activation_checkpointing=mode),
        training_parameters=dt.TrainingParameters(max_steps=3, gradient_accumulation_steps=2, train_batch_size=2),
        activation_checkpointing_parameters=dt.ActivationCheckpointingParameters(**parameters),
    )


class Recording(Trained):
    def configure_models(self) -> None:
        self.model = Net(dropout=0.3)
        self.record: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.record.append(loss.detach())
        self.record += [full(p.grad).clone() for p in self.model.parameters() if p.grad is not None]
        self.step(self.model, self.optimizer)
        return {"loss": loss}


def cost(model: Net) -> dict[str, int]:
    """What one forward and backward of a model in one process keeps and computes."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    x = torch.ones(2, WIDTH, requires_grad=True)
    with Operations() as operations:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(x).sum()
        loss.backward()
    counts = Counter(operations.names)
    return {
        "bytes": sum(kept),
        "matrix products": counts["addmm"] + counts["mm"],
        "activations": counts["gelu"],
    }


def observe(directory: str) -> dict[str, Any]:
    """Trains in each way on this rank."""
    os.chdir(directory)
    found: dict[str, Any] = {}
    runs: dict[str, tuple[Mode, dict[str, Any]]] = {
        "none": ("none", {}),
        "full": ("full", {}),
        "selective": ("selective", {}),
        "every second": ("full", {"every_n_blocks": 2}),
    }
    for name, (mode, parameters) in runs.items():
        with Recording(config_of(mode, **parameters)) as trainer:
            trainer.fit()
            model = trainer.model
            found[name] = {
                "record": trainer.record,
                "weights": [full(p.detach()).clone() for p in model.parameters()],
                "names": list(model.state_dict()),
                "groups": len(fsdp_modules(model)),
                "blocks": [model.layers[index] is block for index, block in enumerate(repeated_blocks(model))],
                "cost": cost(model) if trainer.world.world_size == 1 else None,
            }
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank of a world of one, and of a sharded one of two, saw."""
    return {size: run_world(observe, size, str(tmp_path_factory.mktemp(f"recompute {size}"))) for size in (1, 2)}


WAYS = ["full", "selective", "every second"]


@pytest.mark.pitfall(24)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", ["none", *WAYS])
def test_bits_names_and_shards_are_those_without_it_also_with_dropout(worlds: Any, size: int, way: str) -> None:
    for found in worlds[size]:
        assert len(found[way]["record"]) == len(found["none"]["record"]) >= 6
        for part in ("record", "weights"):
            assert all(map(torch.equal, found[way][part], found["none"][part]))
        assert found[way]["names"] == list(Net().state_dict())
        assert found[way]["groups"] == (N_BLOCKS + 1 if size > 1 else 0)
        assert found[way]["blocks"] == [True] * N_BLOCKS


def test_less_is_kept_and_no_more_than_asked_for_is_computed_again(worlds: Any) -> None:
    none, whole, selective, second = (worlds[1][0][way]["cost"] for way in ("none", *WAYS))
    matrices = 2 * N_BLOCKS + 2
    backward = 2 * matrices  # towards weights and towards inputs
    assert none["matrix products"] == matrices + backward
    assert none["activations"] == N_BLOCKS
    # In backward a block stops as soon as all that it needs is there: its last product is not computed again.
    assert whole["matrix products"] == none["matrix products"] + N_BLOCKS
    assert whole["activations"] == 2 * N_BLOCKS
    assert second["activations"] == N_BLOCKS + N_BLOCKS // 2
    assert selective["matrix products"] == none["matrix products"]
    assert selective["activations"] == 2 * N_BLOCKS
    assert whole["bytes"] < 0.25 * none["bytes"]
    assert whole["bytes"] < second["bytes"] < 0.7 * none["bytes"]


@pytest.mark.pitfall(24)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_copied_model_computes_with_its_own_weights(mode: Mode) -> None:
    with Recording(config_of(mode)) as trainer:
        trainer.fit()
        twin = copy.deepcopy(trainer.model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        x = torch.ones(2, WIDTH)
        assert twin(x).abs().max() == 0
        twin(x).sum().backward()
        assert all(parameter.grad is not None for parameter in twin.parameters())
        assert trainer.model(x).abs().max() > 0
        assert all(parameter.grad is None for parameter in trainer.model.parameters())


class Normed(nn.Module):
    """Blocks with batch norm, whose statistics a forward moves."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=momentum), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.pitfall(80)
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_of_batch_norm_move_once_in_a_step_that_is_computed_again(kind: str, momentum: float | None) -> None:
    from dream_trainer.compat.pytorch import EXPENSIVE_OPERATIONS
    from dream_trainer.modules.recompute import recompute

    torch.manual_seed(0)
    plain, again = Normed(momentum).double(), Normed(momentum).double()
    again.load_state_dict(plain.state_dict())
    for block in again.blocks:
        recompute(block, EXPENSIVE_OPERATIONS if kind == "selective" else ())
    for _ in range(2):
        x = torch.randn(5, 3, dtype=torch.float64)
        for model in (plain, again):
            model(x).square().sum().backward()
    for (name, expected), found in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_model_without_blocks_keeps_activations_and_alone_is_an_error() -> None:
    trainer = Trained(config_of("full"))
    trainer.model, trainer.critic = Net(), nn.Linear(WIDTH, 1)
    trainer.frozen_features = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    trainer.apply_activation_checkpointing()
    assert isinstance(trainer.model.layers[0], Recomputed)
    assert type(trainer.critic) is type(trainer.frozen_features) is nn.Linear
    alone = Trained(config_of("full"))
    alone.model = nn.Linear(WIDTH, 1)
    with pytest.raises(ConfigError, match="model 'model' has no repeated blocks to checkpoint. Override model_blocks"):
        alone.apply_activation_checkpointing()
