"""A head on a frozen body and adapters around loaded weights, trained on two ranks as by hand.

tests/trainer/test_frozen_weights.py resumes such runs.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.trainer.arithmetic import fill, full
from tests.trainer.small import Batch, Samples, filled_network, network, run_config, weights
from tests.worlds import run_world

LENGTH, GLOBAL_BATCH, STEPS, CLIP = 48, 8, 6, 0.05


class Adapted(nn.Module):
    """A frozen layer, and a product of two narrow matrices that is learned and added to it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False, dtype=torch.float64)
        self.up = nn.Linear(rank, layer.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_frozen_body() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    return model


def with_adapters() -> nn.Module:
    model = network().requires_grad_(False)
    for block in model[0]:
        block[0] = Adapted(block[0], rank=2)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1, fused=True)


class Partial(dt.DreamTrainer):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norms: list[float] = []
        self.first: dict[str, Tensor] = {}

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DataLoader(Samples(LENGTH), self.config.training_parameters.train_batch_size), None

    def init_weights(self) -> None:
        fill(self.model)

    def configure_optimizers(self) -> None:
        self.optimizer = adamw(self.model)

    def pre_fit(self) -> None:
        self.first = parameters(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


class Head(Partial):
    def configure_models(self) -> None:
        self.model = with_frozen_body()


class Adapters(Partial):
    """The base's values come from a file, by `init_from` in the config."""

    def configure_models(self) -> None:
        self.model = with_adapters()


CASES: dict[str, type[Partial]] = {"head": Head, "adapters": Adapters}
TRAINED = {
    "head": {"model.1.weight", "model.1.bias"},
    "adapters": {f"model.0.{block}.0.{part}.weight" for block in (0, 1) for part in ("down", "up")},
}


def base_values() -> dict[str, Tensor]:
    """Weights as somebody else saved them: of the network without adapters."""
    model = filled_network()
    return {name: -0.7 * value for name, value in model.state_dict().items()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": value for name, value in weights(model).items()}


def optimizer_state(trainer: Partial) -> dict[str, Tensor]:
    names = {parameter: f"model.{name}" for name, parameter in trainer.model.named_parameters()}
    state = trainer.optimizer.state.items()
    return {f"{names[p]} {key}": full(value).clone() for p, kept in state for key, value in kept.items()}


def train(case: str) -> dict[str, Any]:
    initial = {"init_from": "base.safetensors", "init_strict": False} if case == "adapters" else {}
    config = run_config(
        case,
        training_parameters=dt.TrainingParameters(
            max_steps=STEPS, train_batch_size=GLOBAL_BATCH // 4, gradient_accumulation_steps=2, gradient_clip_norm=CLIP
        ),
        checkpoint_parameters=dt.CheckpointParameters(
            save_every_n_epochs=None, init_renames={r"^0\.(\d)\.0\.": r"0.\1.0.layer."}, **initial
        ),
    )
    with CASES[case](config) as trainer:
        trainer.fit()
        return {
            "first": trainer.first,
            "norms": trainer.norms,
            "weights": parameters(trainer.model),
            "state": optimizer_state(trainer),
        }


def train_all(directory: str) -> dict[str, dict[str, Any]]:
    os.chdir(directory)
    return {case: train(case) for case in CASES}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    save_file(base_values(), directory / "base.safetensors")
    return run_world(train_all, 2, str(directory))


def by_hand(case: str) -> dict[str, Any]:
    model = with_frozen_body() if case == "head" else with_adapters()
    optimizer, trained, norms, data = (
        adamw(model),
        [p for p in model.parameters() if p.requires_grad],
        [],
        Samples(LENGTH),
    )
    fill(model)
    if case == "adapters":
        theirs = base_values()
        for name, parameter in model.named_parameters():
            if ".up." not in name and ".down." not in name:
                parameter.data.copy_(theirs[name.replace(".layer", "")])
    first = parameters(model)
    for x, y in zip(data.x.split(GLOBAL_BATCH), data.y.split(GLOBAL_BATCH), strict=True):
        mse_loss(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {"first": first, "norms": norms, "weights": parameters(model)}


@pytest.mark.pitfall(15)
@pytest.mark.parametrize("case", CASES)
def test_a_part_is_trained_as_by_hand(case: str, ranks: list[dict[str, Any]]) -> None:
    expected = by_hand(case)
    assert max(expected["norms"]) > CLIP
    for rank in ranks:
        found = rank[case]
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, value in expected["weights"].items():
            assert torch.equal(found["first"][name], expected["first"][name]), name
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", TRAINED)
def test_frozen_it_keeps_its_bits_and_has_no_state(case: str, ranks: list[dict[str, Any]], directory: Path) -> None:
    for rank in ranks:
        found = rank[case]
        moved = {name for name, value in found["weights"].items() if not torch.equal(value, found["first"][name])}
        assert moved == TRAINED[case]
        assert {name.partition(" ")[0] for name in found["state"]} == TRAINED[case]
    (metadata,) = (directory / f"runs/tests/trainer/{case}/checkpoints").rglob(".metadata")
    names = set(FileSystemReader(metadata.parent).read_metadata().state_dict_metadata)
    moments = {name for name in names if name.endswith(".exp_avg")}
    assert moments == {f"optimizers.optimizer.{name}.exp_avg" for name in TRAINED[case]}
