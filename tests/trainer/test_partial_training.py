"""Training a part: a head on a frozen body, adapters around loaded weights, models wrapped in different ways.

Each is trained, saved, resumed at the same and at another world size, and compared with the loop written by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.trainer.arithmetic import fill, full
from tests.trainer.small import WIDTH, Batch, Samples, filled_network, network, run_config, weights
from tests.worlds import run_world

LENGTH, GLOBAL_BATCH, SAVED_AT, LAST, CLIP = 48, 8, 3, 6, 0.05


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


def three_parts() -> tuple[nn.Module, nn.Module, nn.Module]:
    encoder = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))).double()
    middle = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh()).double()
    return encoder, middle, nn.Linear(5, 1).double()


def adamw(*models: nn.Module) -> torch.optim.Optimizer:
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Partial(dt.DreamTrainer):
    """The data and the step of all cases; each brings its models and optimizers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norms: list[float] = []
        self.first: dict[str, Tensor] = {}

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DataLoader(Samples(LENGTH), self.config.training_parameters.train_batch_size), None

    def init_weights(self) -> None:
        for model in self.named_models().values():
            fill(model)

    def pre_fit(self) -> None:
        self.first = parameters(self.named_models())

    def forward(self, x: Tensor) -> Tensor:
        for model in self.named_models().values():
            x = model(x)
        return x

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.forward(batch[0]), batch[1]))
        if not self.is_accumulating_gradients:
            for optimizer in self.named_optimizers().values():
                self.norms.append(float(self.step(self.get_model_by_optimizer(optimizer), optimizer)))
        return {}


class Head(Partial):
    def configure_models(self) -> None:
        self.model = with_frozen_body()

    def configure_optimizers(self) -> None:
        self.optimizer = adamw(self.model)


class Adapters(Partial):
    """The base's values come from a file, by `init_from` in the config."""

    def configure_models(self) -> None:
        self.model = with_adapters()

    def configure_optimizers(self) -> None:
        self.optimizer = adamw(self.model)


class Wrappings(Partial):
    """One model in a group for each block, gathered until backward; one in a single group; one whole on every rank."""

    def configure_models(self) -> None:
        self.encoder, self.middle, self.head = three_parts()

    def apply_fully_shard(self, config: dict[str, Any]) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in self.encoder:
            fully_shard(block, **config, reshard_after_forward=False)
        fully_shard(self.encoder, **config)
        fully_shard(self.middle, **config)

    def configure_optimizers(self) -> None:
        self.encoder_optimizer = adamw(self.encoder)
        self.middle_optimizer, self.head_optimizer = sgd(self.middle), sgd(self.head)


CASES: dict[str, type[Partial]] = {"head": Head, "adapters": Adapters, "wrappings": Wrappings}
TRAINED = {
    "head": {"model.1.weight", "model.1.bias"},
    "adapters": {f"model.0.{block}.0.{part}.weight" for block in (0, 1) for part in ("down", "up")},
}


def base_values() -> dict[str, Tensor]:
    """Weights as somebody else saved them: of the network without adapters."""
    model = filled_network()
    return {name: -0.7 * value for name, value in model.state_dict().items()}


def parameters(models: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Whole copies; a collective where they are sharded."""
    return {f"{name}.{fqn}": value for name, model in models.items() for fqn, value in weights(model).items()}


def optimizer_state(trainer: Partial) -> dict[str, Tensor]:
    """Whole copies of what the optimizers keep, by parameter."""
    names = {
        p: f"{name}.{fqn}" for name, model in trainer.named_models().items() for fqn, p in model.named_parameters()
    }
    return {
        f"{names[p]} {key}": full(value).clone()
        for optimizer in trainer.named_optimizers().values()
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def train(case: str, experiment: str, steps: int, accumulation: int, resume: int | str = "auto") -> dict[str, Any]:
    """Trains until `steps`, from a checkpoint of the experiment if it has one, on this rank."""
    initial = {"init_from": "base.safetensors", "init_strict": False} if case == "adapters" else {}
    config = run_config(
        experiment,
        group=case,
        training_parameters=dt.TrainingParameters(
            max_steps=steps,
            train_batch_size=GLOBAL_BATCH // (int(os.environ.get("WORLD_SIZE", "1")) * accumulation),
            gradient_accumulation_steps=accumulation,
            gradient_clip_val=CLIP,
        ),
        checkpoint_parameters=dt.CheckpointParameters(
            save_every_n_epochs=None,
            resume=resume,
            init_renames={r"^0\.(\d)\.0\.": r"0.\1.0.layer."},
            **initial,
        ),
    )
    with CASES[case](config) as trainer:
        trainer.fit()
        return {
            "first": trainer.first,
            "norms": trainer.norms,
            "weights": parameters(trainer.named_models()),
            "state": optimizer_state(trainer),
        }


def train_all(directory: str) -> dict[str, dict[str, Any]]:
    """Each case in one go, and in two parts."""
    os.chdir(directory)
    found = {}
    for case in CASES:
        found[case] = {
            "straight": train(case, "straight", LAST, 2),
            "before": train(case, "cut", SAVED_AT, 2),
            "after": train(case, "cut", LAST, 2),
        }
    return found


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {world_size: tmp_path_factory.mktemp(f"{world_size}-ranks") for world_size in (1, 2)}


@pytest.fixture(scope="module")
def worlds(directories: dict[int, Path]) -> Iterator[dict[int, list[dict[str, Any]]]]:
    for directory in directories.values():
        save_file(base_values(), directory / "base.safetensors")
    before = os.getcwd()
    try:
        yield {1: [train_all(str(directories[1]))], 2: run_world(train_all, 2, str(directories[2]))}
    finally:
        os.chdir(before)


def by_hand(case: str) -> dict[str, Any]:
    """The loop as one writes it, in one process, on whole batches."""
    if case == "wrappings":
        parts = three_parts()
        models = dict(zip(("encoder", "middle", "head"), parts, strict=True))
        optimizers = [adamw(parts[0]), sgd(parts[1]), sgd(parts[2])]
    else:
        model = with_frozen_body() if case == "head" else with_adapters()
        models, optimizers = {"model": model}, [adamw(model)]
    for model in models.values():
        fill(model)
    if case == "adapters":
        theirs = base_values()
        for name, parameter in models["model"].named_parameters():
            if ".up." not in name and ".down." not in name:
                parameter.data.copy_(theirs[name.replace(".layer", "")])
    first, norms = parameters(models), []
    data = Samples(LENGTH)
    for x, y in zip(data.x.split(GLOBAL_BATCH), data.y.split(GLOBAL_BATCH), strict=True):
        for model in models.values():
            x = model(x)
        mse_loss(x, y).backward()
        for optimizer in optimizers:
            trained = optimizer.param_groups[0]["params"]
            norm = torch.sqrt(sum(p.grad.square().sum() for p in trained)).item()
            norms.append(norm)
            for p in trained:
                p.grad *= min(1.0, CLIP / (norm + 1e-6))
            optimizer.step()
            optimizer.zero_grad()
    return {"first": first, "norms": norms, "weights": parameters(models)}


@pytest.mark.pitfall(15)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_part_is_trained_as_by_hand(case: str, world_size: int, worlds: dict[int, Any]) -> None:
    expected = by_hand(case)
    assert max(expected["norms"]) > CLIP
    for rank in worlds[world_size]:
        found = rank[case]["straight"]
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, value in expected["weights"].items():
            assert torch.equal(found["first"][name], expected["first"][name]), name
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", TRAINED)
def test_what_is_frozen_keeps_its_bits_and_costs_no_state(case: str, world_size: int, worlds: dict[int, Any]) -> None:
    for rank in worlds[world_size]:
        for part in rank[case].values():
            moved = {name for name, value in part["weights"].items() if not torch.equal(value, part["first"][name])}
            assert moved == TRAINED[case]
            assert {name.partition(" ")[0] for name in part["state"]} == TRAINED[case]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_in_the_same_bits(case: str, world_size: int, worlds: dict[int, Any]) -> None:
    for rank in worlds[world_size]:
        straight, before, after = (rank[case][part] for part in ("straight", "before", "after"))
        assert before["norms"] + after["norms"] == straight["norms"]
        assert_same_bits(after["first"], before["weights"])
        assert_same_bits(after["weights"], straight["weights"])
        assert_same_bits(after["state"], straight["state"])


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("case", CASES)
def test_one_rank_goes_on_where_two_stopped(
    case: str, worlds: dict[int, Any], directories: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directories[2])
    found, straight = train(case, "cut", LAST, 1, resume=SAVED_AT), worlds[2][0][case]["straight"]
    assert len(found["norms"]) == len(straight["norms"]) * (LAST - SAVED_AT) // LAST
    for part in ("weights", "state"):
        assert found[part].keys() == straight[part].keys()
        for name, value in straight[part].items():
            torch.testing.assert_close(found[part][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", TRAINED)
def test_a_checkpoint_holds_optimizer_state_for_what_is_trained_alone(
    case: str, worlds: dict[int, Any], directories: dict[int, Path]
) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    for directory in directories.values():
        (metadata,) = (directory / f"runs/tests/{case}/straight/checkpoints").rglob(".metadata")
        names = set(FileSystemReader(metadata.parent).read_metadata().state_dict_metadata)
        moments = {name for name in names if name.endswith(".exp_avg")}
        assert moments == {f"optimizers.optimizer.{name}.exp_avg" for name in TRAINED[case]}
