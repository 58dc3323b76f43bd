"""Adapters that start from their base start from the base that is loaded, or the load is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dream_trainer as dt
from tests.api import ConfigError
from tests.trainer.small import FromSeed, run_config, weights
from tests.worlds import run_world

WIDTH = 16
TARGETS = ["up", "down"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.down(torch.tanh(self.up(x)))))


def base() -> Net:
    torch.manual_seed(3)
    return Net()


def inputs() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))


class Started(FromSeed):
    """Makes adapters of a random base, and loads the base."""

    make: Callable[[], PeftConfig]

    def configure_models(self) -> None:
        self.model = get_peft_model(Net(), type(self).make())

    def load_pretrained(self) -> None:
        dt.load_base_weights(self.model, "base.safetensors")

    def configure_optimizers(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return torch.utils.data.DataLoader(inputs(), 1), None


def started(make: Callable[[], PeftConfig], kind: type[Started] = Started, **devices: Any) -> Started:
    devices_of_run = dt.DeviceParameters(device="cpu", **devices)
    config = run_config(device_parameters=devices_of_run, training_parameters=dt.TrainingParameters(max_steps=0))
    trainer = type("Case", (kind,), {"make": staticmethod(make)})(config)
    trainer.fit()
    return trainer


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=TARGETS, **settings)


LEAVE_THE_BASE: dict[str, Callable[[], PeftConfig]] = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "trained whole": lambda: lora(modules_to_save=["head", "norm"]),
    "bias": lambda: lora(use_rslora=True, lora_bias=True),
    "tinylora": lambda: peft.TinyLoraConfig(target_modules=TARGETS),
    "ln tuning": lambda: peft.LNTuningConfig(target_modules=["norm"]),
    "oft": lambda: peft.OFTConfig(target_modules=TARGETS),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down"]),
    "osf": lambda: peft.OSFConfig(target_modules=TARGETS),
}
"""Ways under which a model computes at first what its base does, as peft's documentation and a look at it say."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file(base().state_dict(), "base.safetensors")
    return tmp_path


@pytest.mark.pitfall(93)
@pytest.mark.parametrize("name", LEAVE_THE_BASE)
def test_adapters_start_from_the_base_that_is_loaded(name: str, directory: Path) -> None:
    make = LEAVE_THE_BASE[name]
    expected = base()(inputs())
    plain = get_peft_model(base(), make())
    torch.testing.assert_close(plain.eval()(inputs()), expected, rtol=0, atol=1e-5)
    with started(make) as trainer:
        torch.testing.assert_close(trainer.model.eval()(inputs()), expected, rtol=0, atol=1e-5)


def magnitudes(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in weights(model).items() if "magnitude" in name}


class Cast(Started):
    """In another precision than it was built in, and with two adapters."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.add_adapter("second", type(self).make())
        self.model.double()


def on_two_ranks(directory: str) -> list[dict[str, Tensor]]:
    os.chdir(directory)
    found = []
    for layout in ({"dp_shard": 2}, {"dp_shard": 1, "dp_replicate": 2}):
        with started(LEAVE_THE_BASE["dora"], Cast, **layout) as trainer:
            found.append(magnitudes(trainer.model))
    return found


def test_magnitudes_are_those_of_the_loaded_weights_on_every_mesh_and_in_each_precision(directory: Path) -> None:
    norms = {name: getattr(base(), name).weight.norm(dim=1) for name in TARGETS}
    with started(LEAVE_THE_BASE["dora"], Cast) as trainer:
        alone = magnitudes(trainer.model)
    for found in (alone, *(each for rank in run_world(on_two_ranks, 2, str(directory)) for each in rank)):
        assert len(found) == 4
        for name, value in found.items():
            torch.testing.assert_close(value.float(), norms[name.split(".")[2]], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lora(init_lora_weights="pissa"), "'pissa'.* changed or read "),
        (lambda: lora(kasa_config=peft.KasaConfig()), "kasa_config.* changed or read "),
        (lambda: peft.FrodConfig(target_modules=TARGETS), "'FROD'.* changed or read "),
    ],
)
def test_a_base_changed_with_it_is_not_loaded(make: Callable[[], PeftConfig], said: str, directory: Path) -> None:
    with pytest.raises(ConfigError, match=f"{said}.* Call from_pretrained"):
        started(make)


class BuiltBefore(Started):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = get_peft_model(Net(), type(self).make())

    def configure_models(self) -> None:
        pass


def test_adapters_that_may_start_from_a_base_are_refused_on_one_that_was_built_before(directory: Path) -> None:
    with pytest.raises(ConfigError, match="use_dora=True may start from the base's weights.* Call from_pretrained"):
        started(LEAVE_THE_BASE["dora"], BuiltBefore)
    with started(LEAVE_THE_BASE["trained whole"], BuiltBefore) as trainer:
        torch.testing.assert_close(trainer.model.eval()(inputs()), base()(inputs()), rtol=0, atol=1e-6)


class OnReal(Started):
    """The way that is always right: the base is there when the adapters are made."""

    def configure_models(self) -> None:
        self.model = get_peft_model(base_from_file(), type(self).make())

    def load_pretrained(self) -> None:
        pass


def base_from_file() -> Net:
    model = Net()
    model.load_state_dict(load_file("base.safetensors"))
    return model


def test_adapters_made_of_a_base_that_is_there_start_from_it(directory: Path) -> None:
    for make in (LEAVE_THE_BASE["dora"], lambda: lora(init_lora_weights="pissa")):
        with started(make, OnReal) as trainer:
            torch.testing.assert_close(trainer.model.eval()(inputs()), base()(inputs()), rtol=0, atol=1e-5)
