"""A frozen base that nobody loaded is warned of, once; what was loaded, copied or meant to be frozen is not."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

import dream_trainer as dt
from tests.trainer.small import FromSeed, fit, run_config, told
from tests.worlds import run_world

WIDTH = 8


def body() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


class Probe(FromSeed):
    """A head on a frozen body that is as the seed drew it."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(body().requires_grad_(False), nn.Linear(WIDTH, 1))

    def configure_optimizers(self) -> None:
        trained = [p for model in self.named_models().values() for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DataLoader(TensorDataset(torch.ones(8, WIDTH), torch.ones(8, 1)), 4), None


class Llama(Probe):
    sizes = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)

    def configure_models(self) -> None:
        base = AutoModelForCausalLM.from_config(self.sizes)
        self.model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=1, target_modules=["q_proj"]))

    def loss_of(self, batch: Any) -> Tensor:
        rows = batch[0].long()
        return self.model(input_ids=rows, labels=rows).loss


class FromPretrained(Llama):
    def configure_models(self) -> None:
        super().configure_models()
        base = AutoModelForCausalLM.from_pretrained("llama")
        self.model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=1, target_modules=["q_proj"]))


def values() -> dict[str, Tensor]:
    torch.manual_seed(3)
    state = {f"0.{name}": value.detach().clone() for name, value in body().state_dict().items()}
    for value in state.values():
        value[0] = 0
    return state


class Loaded(Probe):
    def load_pretrained(self) -> None:
        dt.load_weights(self.model, "body.safetensors", strict=False)


class ByHand(Probe):
    def load_pretrained(self) -> None:
        for name, value in load_file("body.safetensors").items():
            self.model.get_parameter(name).data.copy_(value)


class Teacher(Probe):
    def configure_models(self) -> None:
        self.model = nn.Linear(WIDTH, 1)
        self.teacher = body().requires_grad_(False)


class Table(Probe):
    """Most of it is a table of sines, in the two ways that it is written, and one of zeros."""

    def configure_models(self) -> None:
        places = torch.arange(512.0)[:, None] * torch.exp(-torch.arange(WIDTH) * math.log(100.0))
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.model.places = nn.Parameter(places.sin(), requires_grad=False)
        self.model.empty = nn.Parameter(torch.empty(512, WIDTH), requires_grad=False)
        self.model.empty[:, 0::2] = places.sin()[:, 0::2]
        self.model.empty[:, 1::2] = places.cos()[:, 1::2]
        self.model.zeros = nn.Parameter(torch.zeros(512, WIDTH), requires_grad=False)


class Thawed(Probe):
    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


def config(experiment: str, steps: int = 1, **checkpoint: Any) -> dt.DreamTrainerConfig:
    return run_config(
        experiment,
        training_parameters=dt.TrainingParameters(max_steps=steps),
        checkpoint_parameters=dt.CheckpointParameters(**checkpoint),
    )


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    save_file(values(), "body.safetensors")

    def run(kind: type[Probe], experiment: str = "run", steps: int = 1, **checkpoint: Any) -> list[str]:
        caplog.clear()
        fit(kind(config(experiment, steps, **checkpoint)))
        return [m for record in caplog.records if "random initial values" in (m := record.getMessage())]

    return run


@pytest.mark.parametrize(
    ("kind", "numbers"), [(Probe, "trains 9 of its 225 parameters, and 216 are"), (Llama, "trains ")]
)
def test_an_unloaded_base_has_its_numbers(kind: type[Probe], numbers: str, warned: Callable[..., list[str]]) -> None:
    (said,) = warned(kind)
    assert f"model 'model' {numbers}" in said
    assert "no weights were loaded into them. Load them in load_pretrained, by load_base_weights under adapters" in said


def test_what_transformers_have_loaded_is_not(warned: Callable[..., list[str]]) -> None:
    AutoModelForCausalLM.from_config(Llama.sizes).save_pretrained("llama")
    assert warned(FromPretrained) == []


@pytest.mark.parametrize("kind", [Loaded, ByHand, Teacher, Table, Thawed])
def test_what_is_no_fault_is_not(kind: type[Probe], warned: Callable[..., list[str]]) -> None:
    assert warned(kind) == []


def test_init_from_and_a_resume_load_it_too(warned: Callable[..., list[str]]) -> None:
    assert warned(Probe, init_from="body.safetensors", init_strict=False) == []
    assert warned(Probe, steps=2) == []  # from the checkpoint
    assert len(warned(Probe, "another")) == 1


def train_on_ranks() -> list[str]:
    with told() as said:
        for kind in (Probe, Loaded):
            fit(kind(config(kind.__name__)))
    return [line for line in said if "random initial values" in line]


def test_on_ranks_that_have_parts_one_says_it(tmp_path: Path) -> None:
    save_file(values(), tmp_path / "body.safetensors")
    first, second = run_world(train_on_ranks, 2)
    assert len(first) == 1
    assert second == []
    assert "trains 9 of its 225 parameters" in first[0]
