"""What two sharded ranks saved, loaded by one, two, three and four and onto HSDP: every bit, and the same run after it.

Two models with an optimizer of their own kind each, tied weights, a scheduler with integer keys, and averages. No
number of ranks but one divides the widths, and some ranks get nothing of the smallest layers.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

import dream_trainer as dt
from tests.api import DistributedDataLoader, local_tensor
from tests.trainer.arithmetic import full
from tests.trainer.small import run_config
from tests.worlds import run_world

VOCABULARY, WIDTH, INNER = 7, 5, 3
GLOBAL_BATCH, SAVED_AT, LAST = 12, 3, 6


class Sentences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH * LAST, 4), generator=generator)
        self.values = torch.randn(GLOBAL_BATCH * LAST, WIDTH, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.values[index]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.down, self.up = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.tanh(self.down(self.norm(x))))


class Tied(nn.Module):
    """The head's weights are the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TwoModels(dt.DreamTrainer):
    """Trains both in each step, and keeps what was loaded."""

    loaded: dict[str, Any] | None = None

    def configure_models(self) -> None:
        self.words = Tied()
        self.values = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH)).double()

    def configure_optimizers(self) -> None:
        parameters = list(self.words.parameters())
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=0.02,
        )
        self.sgd = torch.optim.SGD(self.values.parameters(), lr=0.05, momentum=0.9)

    def configure_schedulers(self) -> None:
        self.decay = torch.optim.lr_scheduler.MultiStepLR(self.adam, [1, 4, 5, 5], gamma=0.5)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DistributedDataLoader(Sentences(), 1, shuffle=True), None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, values = batch
        scores = self.words(tokens[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        other = mse_loss(self.values(values), values.flip(1))
        self.backward(loss, model=self.words)
        self.backward(other, model=self.values)
        if not self.is_accumulating_gradients:
            self.step(self.words, self.adam, self.decay)
            self.step(self.values, self.sgd)
        return {"words": loss, "values": other}

    def on_load(self, path: Path) -> None:
        self.loaded = state_of(self)


def state_of(trainer: TwoModels) -> dict[str, Any]:
    """Whole copies of everything that is the same at any number of ranks."""
    tensors: dict[str, Tensor] = {}
    for name, model in (("words", trainer.words), ("values", trainer.values)):
        tensors |= {f"{name}.{fqn}": tensor for fqn, tensor in model.state_dict().items()}
        averages = trainer.get_callback(dt.EMA).averaged(name)
        tensors |= {f"average of {name}.{fqn}": tensor for fqn, tensor in averages.items()}
    for model, optimizer in ((trainer.words, trainer.adam), (trainer.values, trainer.sgd)):
        for fqn, parameter in model.named_parameters():
            tensors |= {f"{fqn}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {
        "tensors": {name: full(tensor).detach().clone() for name, tensor in tensors.items()},
        "shared": {
            "scheduler": trainer.decay.state_dict(),
            "rates": [group["lr"] for group in (*trainer.adam.param_groups, *trainer.sgd.param_groups)],
            "decays": [group["weight_decay"] for group in trainer.adam.param_groups],
            "averages": trainer.get_callback(dt.EMA).state_dict(),
            "counters": (trainer.global_step, trainer.samples_seen, trainer.current_epoch),
            "tied": trainer.words.head.weight is trainer.words.embedding.weight,
        },
    }


def make_trainer(experiment: str, *, steps: int, devices: dt.DeviceParameters | None = None) -> TwoModels:
    return TwoModels(
        run_config(
            experiment,
            callbacks=dt.CallbackCollection([dt.EMA(0.9)]),
            device_parameters=devices or dt.DeviceParameters(device="cpu"),
            training_parameters=dt.TrainingParameters(max_steps=steps, global_batch_size=GLOBAL_BATCH),
            checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None),
        )
    )


def save_at_two(directory: str) -> dict[str, Any]:
    """A run stopped at a step, which is copied for others to go on with, and the run that was not stopped."""
    os.chdir(directory)
    with make_trainer("run", steps=SAVED_AT) as trainer:
        trainer.fit()
        saved = state_of(trainer)
    with make_trainer("straight", steps=LAST) as trainer:
        trainer.fit()
        straight = state_of(trainer)
    if trainer.world.is_main:
        for name in ("one", "three", "four", "hsdp"):
            shutil.copytree("runs", Path(name) / "runs")
    return {"saved": saved, "straight": straight, "two": go_on(directory, []), "exports": exports()}


def go_on(directory: str, layouts: list[tuple[str, dt.DeviceParameters]]) -> dict[str, Any]:
    """What was loaded, and where the run ends from there; in each of some directories, or in `directory` itself."""
    found: dict[str, Any] = {}
    for name, devices in layouts or [("", dt.DeviceParameters(device="cpu"))]:
        os.chdir(Path(directory) / name)
        with make_trainer("run", steps=LAST, devices=devices) as trainer:
            trainer.fit()
            found[name] = {"loaded": trainer.loaded, "end": state_of(trainer)}
            found[name]["pieces"] = [local_tensor(p).numel() for p in trainer.words.parameters()]
    return found if layouts else found[""]


def exports() -> dict[str, Any]:
    """Exports of a run that is over, and what it holds before and after."""
    with make_trainer("straight", steps=LAST) as trainer:
        trainer.fit()
        before = state_of(trainer)
        paths = {
            "words": trainer.export("exported/words", model="words"),
            "values": trainer.export("exported/values.safetensors", model="values"),
            "averages": trainer.export("exported/averages", model="words", weights="ema"),
            "half": trainer.export("exported/half.safetensors", model="values", dtype=torch.bfloat16),
            "shards": trainer.export("exported/shards", model="words", max_shard_size=400),
        }
        after = state_of(trainer)
    return {"paths": {name: [str(path) for path in files] for name, files in paths.items()}, "states": (before, after)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sizes")


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> list[dict[str, Any]]:
    return run_world(save_at_two, 2, str(directory))


def assert_loaded_and_ended_alike(found: dict[str, Any], two_ranks: list[dict[str, Any]]) -> None:
    saved, straight = two_ranks[0]["saved"], two_ranks[0]["straight"]
    assert found["loaded"]["tensors"].keys() == saved["tensors"].keys()
    for name, value in saved["tensors"].items():
        assert found["loaded"]["tensors"][name].dtype == value.dtype
        assert torch.equal(found["loaded"]["tensors"][name], value), name
    assert found["loaded"]["shared"] == saved["shared"]
    for name, value in straight["tensors"].items():
        torch.testing.assert_close(found["end"]["tensors"][name], value, rtol=0, atol=1e-10)
    assert found["end"]["shared"] == straight["shared"]


def test_there_is_something_of_every_kind(two_ranks: list[dict[str, Any]]) -> None:
    """So that the comparisons below mean something."""
    one, two = (rank["saved"] for rank in two_ranks)
    names = set(one["tensors"])
    assert {"words.embedding.weight", "words.head.weight", "words.scale", "values.2.bias"} <= names
    assert {"embedding.weight.exp_avg", "embedding.weight.exp_avg_sq", "embedding.weight.step"} <= names
    assert {"2.bias.momentum_buffer", "average of words.embedding.weight", "average of values.2.bias"} <= names
    assert all(torch.equal(two["tensors"][name], value) for name, value in one["tensors"].items())
    assert one["shared"]["scheduler"]["milestones"] == {1: 1, 4: 1, 5: 2}
    assert one["shared"]["tied"]
    moved = two_ranks[0]["straight"]["tensors"]
    assert [n for n in names if torch.equal(moved[n], one["tensors"][n])] == ["words.scale"]


def test_two_ranks_take_it_back(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert_loaded_and_ended_alike(rank["two"], two_ranks)


@pytest.mark.pitfall(39)
def test_one_rank_takes_it(two_ranks: list[dict[str, Any]], directory: Path) -> None:
    before = os.getcwd()
    try:
        found = go_on(str(directory), [("one", dt.DeviceParameters(device="cpu"))])
    finally:
        os.chdir(before)
    assert_loaded_and_ended_alike(found["one"], two_ranks)


def test_three_ranks_take_it(two_ranks: list[dict[str, Any]], directory: Path) -> None:
    for rank in run_world(go_on, 3, str(directory), [("three", dt.DeviceParameters(device="cpu"))]):
        assert_loaded_and_ended_alike(rank["three"], two_ranks)


@pytest.mark.slow
@pytest.mark.pitfall(35)
@pytest.mark.pitfall(39)
def test_four_ranks_take_it_sharded_and_as_two_replicas_of_two_shards(
    two_ranks: list[dict[str, Any]], directory: Path
) -> None:
    layouts = [
        ("four", dt.DeviceParameters(device="cpu")),
        ("hsdp", dt.DeviceParameters(device="cpu", dp_replicate=2, dp_shard=2)),
    ]
    ranks = run_world(go_on, 4, str(directory), layouts)
    for rank in ranks:
        assert_loaded_and_ended_alike(rank["four"], two_ranks)
        assert_loaded_and_ended_alike(rank["hsdp"], two_ranks)
    assert min(ranks[3]["four"]["pieces"]) == 0
    assert ranks[0]["hsdp"]["pieces"] == ranks[2]["hsdp"]["pieces"] != ranks[1]["hsdp"]["pieces"]


# -- exports of the sharded run


def exported(directory: Path, two_ranks: list[dict[str, Any]], name: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    paths = [Path(path) for path in two_ranks[0]["exports"]["paths"][name]]
    tensors: dict[str, Tensor] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            tensors |= load_file(directory / path)
    return tensors


@pytest.mark.parametrize("name", ["words", "values", "averages", "shards"])
def test_an_export_of_two_ranks_holds_the_whole_tensors(
    name: str, two_ranks: list[dict[str, Any]], directory: Path
) -> None:
    state = two_ranks[0]["straight"]["tensors"]
    tensors = exported(directory, two_ranks, name)
    model = "values" if name == "values" else "words"
    fresh = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH)) if model == "values" else Tied()
    missing = fresh.double().load_state_dict(tensors, strict=False)
    assert missing.unexpected_keys == []
    assert set(missing.missing_keys) <= {"head.weight"}  # tied to what is there
    for fqn, value in fresh.state_dict().items():
        expected = state[f"{model}.{fqn}"]
        if name == "averages":
            average = state.get(f"average of {model}.{'embedding.weight' if fqn == 'head.weight' else fqn}")
            expected = expected if average is None else average
        assert torch.equal(value, expected), fqn
    assert len(two_ranks[0]["exports"]["paths"]["shards"]) > 2


def test_an_export_may_be_narrower(two_ranks: list[dict[str, Any]], directory: Path) -> None:
    state = two_ranks[0]["straight"]["tensors"]
    tensors = exported(directory, two_ranks, "half")
    assert {f"values.{name}" for name in tensors} == {name for name in state if name.startswith("values.")}
    for name, value in tensors.items():
        assert torch.equal(value, state[f"values.{name}"].to(torch.bfloat16))


def test_an_export_changes_nothing(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        before, after = rank["exports"]["states"]
        assert before["shared"] == after["shared"]
        for name, value in before["tensors"].items():
            assert torch.equal(after["tensors"][name], value)
            assert torch.equal(two_ranks[0]["straight"]["tensors"][name], value)
