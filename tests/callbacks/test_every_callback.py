"""What holds for every callback there is: it trains, resumes, bears a twin, and changes nothing.

That it does so on two ranks is tested in test_on_ranks.py, which starts them.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer import callbacks as shipped
from dream_trainer.config import to_dict
from dream_trainer.errors import ConfigError
from dream_trainer.trainer.events import EVENTS
from tests.callbacks.factories import FACTORIES, SECOND
from tests.trainer.small import assert_same_weights, weights

INTERFACES = {"Callback", "CallbackCollection", "LoggingCallback", "TimedCallback"}


class Listens(shipped.Callback):
    """Keeps the names of what is logged."""

    def __init__(self) -> None:
        self.logged: list[str] = []

    def on_log(self, trainer: Any, metrics: dict[str, float], step: int) -> None:
        self.logged.extend(metrics)


class Student(dt.DreamTrainer):
    """Trains `model`; `teacher` is there for whoever copies weights."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.teacher = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.teacher.requires_grad_(False)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        x = torch.linspace(-1, 1, 96 * 4, dtype=torch.float64).reshape(96, 4)
        data = torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))
        size = self.config.training_parameters.train_batch_size
        return torch.utils.data.DataLoader(data, size, shuffle=True), torch.utils.data.DataLoader(data, 48)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer)
        return {"loss": loss, "picture": batch[0].abs().reshape(-1, 1, 2, 2)}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}


def make(callbacks: Sequence[dt.Callback], *, batch_size: int = 8, max_steps: int = 12) -> Student:
    return Student(
        dt.DreamTrainerConfig(
            project="p",
            group="g",
            experiment="e",
            callbacks=dt.CallbackCollection(callbacks),
            device_parameters=dt.DeviceParameters(device="cpu"),
            training_parameters=dt.TrainingParameters(
                max_steps=max_steps, train_batch_size=batch_size, global_batch_size=8, val_every_n_steps=4
            ),
            logger_parameters=dt.LoggerParameters(loggers=(), log_every_n_steps=2),
            checkpoint_parameters=dt.CheckpointParameters(async_save=False),
        )
    )


def trained(callbacks: Sequence[dt.Callback], directory: Path, **options: Any) -> dict[str, Tensor]:
    """The weights after a run in a directory of its own."""
    directory.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(directory)
    try:
        with make(callbacks, **options) as trainer:
            configured = to_dict(trainer.config)
            trainer.fit()
            assert to_dict(trainer.config) == configured  # what a callback counts is no part of it
            return weights(trainer.model)
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of a run without callbacks."""
    return trained([], tmp_path_factory.mktemp("untouched"))


def test_every_shipped_callback_is_in_the_table() -> None:
    assert set(FACTORIES) == set(shipped.__all__) - INTERFACES


def test_what_a_callback_was_given_is_in_the_record_of_the_config() -> None:
    callbacks = [factory() for factory in FACTORIES.values()]
    for callback, record in zip(callbacks, to_dict(make(callbacks).config)["callbacks"], strict=True):
        arguments = set(inspect.signature(type(callback)).parameters)
        assert record.keys() - {"class"} == arguments - {"clock", "file", "function", "inputs", "tokens"}, record


@pytest.mark.parametrize("name", FACTORIES)
def test_a_run_with_it_stopped_and_resumed_ends_where_one_without_it_ends(
    name: str, untouched: dict[str, Tensor], tmp_path: Path
) -> None:
    trained([FACTORIES[name]()], tmp_path, max_steps=6)
    assert_same_weights(trained([FACTORIES[name]()], tmp_path), untouched)


@pytest.mark.pitfall(50)
@pytest.mark.parametrize("name", FACTORIES)
def test_two_of_it_run_beside_each_other(name: str, untouched: dict[str, Tensor], tmp_path: Path) -> None:
    listener = Listens()
    pair = [FACTORIES[name](), SECOND.get(name, FACTORIES[name])()]
    assert_same_weights(trained([*pair, listener], tmp_path), untouched)
    if isinstance(pair[0], shipped.LoggingCallback):  # each under its own name, and as if the other were not there
        first, second = (callback.name for callback in pair if isinstance(callback, shipped.LoggingCallback))
        starts = {metric.split("/")[0] for metric in listener.logged} - {"train", "val"}
        assert starts == {first, second}
    else:
        assert {metric.split("/")[0] for metric in listener.logged} == {"train", "val"}


@pytest.mark.pitfall(50)
def test_two_that_would_log_under_one_name_are_refused_when_put_together() -> None:
    for name, factory in FACTORIES.items():
        one, other = factory(), factory()
        if isinstance(one, shipped.LoggingCallback):
            with pytest.raises(ConfigError, match=f"{name} and {name} would both log under name='{one.name}'"):
                dt.CallbackCollection([one, Listens(), other])
    with pytest.raises(ConfigError, match=r"LearningRate and Memory would both .* Memory\(name='lr_2'\)"):
        dt.CallbackCollection([shipped.LearningRate(), shipped.Memory(name="lr")])
    with pytest.raises(ConfigError, match="name=10 names nothing"):
        shipped.Throughput(10)  # type: ignore[arg-type]


@pytest.mark.pitfall(51)
@pytest.mark.parametrize("name", FACTORIES)
def test_only_what_it_overrides_is_dispatched_and_described(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = FACTORIES[name]()
    own = {key for cls in type(callback).__mro__[: type(callback).__mro__.index(dt.Callback)] for key in vars(cls)}
    trainer = make([callback])  # whose constructor builds the table, and starts nothing
    assert {event for event in EVENTS if trainer._events[event]} == own & set(EVENTS)
    assert f"| {name} |" in trainer.describe()
    assert not list(tmp_path.iterdir())
    capsys.readouterr()


def all_together(directory: str) -> tuple[dict[str, Tensor], list[str]]:
    """On each of two ranks: a sharded run with one of each, stopped and resumed; its weights, and names of what was
    logged."""
    listener = Listens()
    trained([make_one() for make_one in FACTORIES.values()], Path(directory), batch_size=4, max_steps=6)
    everything = [*(make_one() for make_one in FACTORIES.values()), listener]
    return trained(everything, Path(directory), batch_size=4), listener.logged


@pytest.mark.pitfall(51)
def test_importing_callbacks_imports_no_optional_package() -> None:
    program = (
        "import sys\n"
        "from dream_trainer import callbacks\n"
        "for name in callbacks.__all__:\n"
        "    getattr(callbacks, name)\n"
        "optional = {'rich', 'wandb', 'tensorboard', 'torchmetrics', 'matplotlib', 'PIL', 'psutil'}\n"
        "print(sorted(optional & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
