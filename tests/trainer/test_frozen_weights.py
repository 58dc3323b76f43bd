"""Frozen weights left out of checkpoints: runs that go on from such are, bit for bit, those never interrupted."""

import os
from contextlib import chdir
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
from tests.api import CheckpointError
from tests.trainer.arithmetic import fill, same_bits
from tests.trainer.small import Batch, Samples, filled_network, network, run_config, weights
from tests.worlds import run_world

LENGTH, GLOBAL_BATCH = 48, 8


class Adapted(nn.Module):
    """A frozen layer, and a product of two narrow matrices that is learned and added to it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False, dtype=torch.float64)
        self.up = nn.Linear(rank, layer.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def base_values() -> dict[str, Tensor]:
    """Weights as somebody else saved them: of the network without adapters."""
    return {name: -0.7 * value for name, value in filled_network().state_dict().items()}


class Tuned(dt.DreamTrainer):
    """Adapters around a base from a file, a frozen teacher beside them, and a head that is thawed after two steps."""

    moves_teacher = thaws = False
    base = "base.safetensors"

    def configure_models(self) -> None:
        self.model = network().requires_grad_(False)
        for block in self.model[0]:
            block[0] = Adapted(block[0], rank=2)
        self.teacher = network().requires_grad_(False)

    def init_weights(self) -> None:
        fill(self.model)
        fill(self.teacher)

    def load_pretrained(self) -> None:
        renames = {r"^0\.(\d)\.0\.": r"0.\1.0.layer."}
        dt.load_weights(self.model, self.base, renames=renames, strict=False)

    def configure_optimizers(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad or self.thaws]
        self.optimizer = torch.optim.AdamW(trained, lr=0.02)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DataLoader(Samples(LENGTH), self.config.training_parameters.train_batch_size), None

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        if self.thaws and self.global_step >= 2:
            self.model[1].requires_grad_(True)
        with torch.no_grad():
            wanted = batch[1] + self.teacher(batch[0])
        loss = mse_loss(self.model(batch[0]), wanted)
        self.backward(loss)
        self.step(self.model, self.optimizer)
        if self.moves_teacher:
            with torch.no_grad():
                for teacher in self.teacher.parameters():
                    teacher.data.mul_(0.9)  # which no version counter sees
        return {"loss": loss}


KINDS: dict[str, dict[str, Any]] = {
    "Tuned": {},
    "Followed": {"moves_teacher": True},
    "Thawed": {"thaws": True},
    "Changed": {"base": "other.safetensors"},
}


def train(kind: str, experiment: str, steps: int, **checkpoint: Any) -> dict[str, Tensor]:
    config = run_config(
        experiment,
        group=kind,
        training_parameters=dt.TrainingParameters(
            max_steps=steps, train_batch_size=GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1"))
        ),
        checkpoint_parameters=dt.CheckpointParameters(
            **{"save_every_n_epochs": None, "save_frozen": False} | checkpoint
        ),
    )
    with type(kind, (Tuned,), KINDS[kind])(config) as trainer:
        trainer.fit()
        return {f"{name}.{k}": v for name, model in trainer.named_models().items() for k, v in weights(model).items()}


def stored(kind: str, experiment: str, step: int) -> set[str]:
    """The models' tensors in a checkpoint, as PyTorch's own reader finds them."""
    path = Path(f"runs/tests/{kind}/{experiment}/checkpoints/step_{step:08d}")
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name.removeprefix("models.") for name in names if name.startswith("models.")}


ADAPTERS = {f"model.0.{block}.0.{part}.weight" for block in (0, 1) for part in ("down", "up")}
HEAD = {"model.1.weight", "model.1.bias"}
TEACHER = {f"teacher.{name}" for name in network().state_dict()}
STORED = {"Tuned": ADAPTERS, "Followed": ADAPTERS | TEACHER, "Thawed": ADAPTERS | HEAD}


def run_all() -> dict[str, Any]:
    return {
        kind: {
            "straight": train(kind, "straight", 6, save_frozen=True),
            "cut": train(kind, "cut", 3),
            "after": train(kind, "cut", 6),
        }
        for kind in STORED
    }


@pytest.fixture(scope="module", params=[1, 2])
def all_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp(f"{request.param}-ranks")
    save_file(base_values(), path / "base.safetensors")
    changed = {name: value + (name == "0.0.0.weight") * 1e-9 for name, value in base_values().items()}
    save_file(changed, path / "other.safetensors")
    with chdir(path):
        return path, [run_all()] if request.param == 1 else run_world(run_all, 2)


@pytest.fixture
def directory(all_runs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What each rank's runs came to, in the directory where they were."""
    monkeypatch.chdir(all_runs[0])
    return all_runs[1]


@pytest.mark.parametrize("kind", STORED)
def test_a_run_goes_on_in_the_same_bits(kind: str, directory: Any) -> None:
    for rank in directory:
        straight = rank[kind]["straight"]
        assert same_bits(rank[kind]["after"], straight)
        for name, value in base_values().items():
            place, _, of_layer = name.rpartition(".")
            if place != "1":
                assert torch.equal(straight[f"model.{place}.layer.{of_layer}"], value), "what is frozen has moved"


@pytest.mark.parametrize("kind", STORED)
def test_only_what_has_not_changed_is_left_out(kind: str, directory: Any) -> None:
    assert stored(kind, "cut", 3) == STORED[kind]
    assert stored(kind, "cut", 6) == STORED[kind]
    assert stored(kind, "straight", 6) == directory[0][kind]["straight"].keys()


def test_one_process_goes_on_where_any_number_stopped(directory: Any) -> None:
    after = train("Tuned", "alone", 6, resume="runs/tests/Tuned/cut/checkpoints/step_00000003")
    torch.testing.assert_close(after, directory[0]["Tuned"]["straight"], rtol=0, atol=1e-10)


def test_a_base_that_changed_is_refused(directory: Any) -> None:
    with pytest.raises(CheckpointError) as refused:
        train("Changed", "cut", 6, resume="runs/tests/Tuned/cut/checkpoints/step_00000003")
    message = str(refused.value)
    assert "1 of those 12 are not what this run has: models.model.0.0.0.layer.weight (float64 (3, 3) " in message
    assert str(Path("base.safetensors").resolve()) in message
