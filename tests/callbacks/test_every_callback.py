"""What holds for every callback there is: it trains, resumes, bears a twin, serves the next trainer, changes nothing.

That it does so on two ranks is tested in test_on_ranks.py, which starts them.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer import callbacks as shipped
from tests.api import EVENTS, ConfigError, to_dict
from tests.callbacks.factories import FACTORIES, PRINTED, SECOND
from tests.callbacks.recording import Recorder, names
from tests.trainer.small import assert_same_weights, run_config, weights

INTERFACES = {"Callback", "CallbackCollection", "LoggingCallback", "TimedCallback"}


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
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}


class Fails(Student):
    """Comes to an end in the midst of its eighth window, after the optimizer has stepped."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        if self.global_step == 7:
            raise RuntimeError("the eighth window")
        return result


def make(
    callbacks: Sequence[dt.Callback],
    *,
    kind: type[Student] = Student,
    batch_size: int = 8,
    max_steps: int = 12,
    seed: int = 0,
) -> Student:
    return kind(
        run_config(
            "e",
            seed=seed,
            callbacks=dt.CallbackCollection(callbacks, defaults=[]),
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
    with contextlib.chdir(directory), make(callbacks, **options) as trainer:
        configured = to_dict(trainer.config)
        trainer.fit()
        assert to_dict(trainer.config) == configured  # what a callback counts is not a part of it
        assert "state of ranks" not in trainer._runtime.said_once  # equal on all ranks
        return weights(trainer.model)


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
def test_stopped_and_resumed_a_run_ends_as_without_it(name: str, untouched: dict[str, Tensor], tmp_path: Path) -> None:
    trained([FACTORIES[name]()], tmp_path, max_steps=6)
    assert_same_weights(trained([FACTORIES[name]()], tmp_path), untouched)


@pytest.mark.pitfall(50)
@pytest.mark.parametrize("name", FACTORIES)
def test_two_of_it_run_beside_each_other(name: str, untouched: dict[str, Tensor], tmp_path: Path) -> None:
    recorder = Recorder()
    pair = [FACTORIES[name](), SECOND.get(name, FACTORIES[name])()]
    assert_same_weights(trained([*pair, recorder], tmp_path), untouched)
    prefixes = {metric.split("/")[0] for metric in names(recorder, "")}
    if isinstance(pair[0], shipped.LoggingCallback):  # each under its own name, and as if the other were not there
        first, second = (callback.name for callback in pair if isinstance(callback, shipped.LoggingCallback))
        assert prefixes == {"train", "val", first, second}
    else:
        assert prefixes == {"train", "val"}


@pytest.mark.pitfall(50)
def test_two_that_would_log_under_one_name_are_refused_when_put_together() -> None:
    for name, factory in FACTORIES.items():
        one, other = factory(), factory()
        if isinstance(one, shipped.LoggingCallback):
            with pytest.raises(ConfigError, match=f"{name} and {name} would both log under name='{one.name}'"):
                dt.CallbackCollection([one, Recorder(), other])
    with pytest.raises(ConfigError, match=r"LearningRate and Memory would both .* Memory\(name='lr_2'\)"):
        dt.CallbackCollection([shipped.LearningRate(), shipped.Memory(name="lr")])


def nothing(trainer: Any) -> None:
    """For `Every`."""


WRONG: list[tuple[str, Callable[[], dt.Callback]]] = [
    ("decay='0.99' is not a number from 0.0 to below 1.0", lambda: shipped.EMA("0.99")),
    (r"models=3 is not a tuple of strings. Use such as models=\('model',\)", lambda: shipped.EMA(models=3)),
    (r"metric=\['val/loss'\] is not a name. Use .* metric='val/loss'", lambda: shipped.EarlyStopping(["val/loss"])),
    (r"inputs=tensor.* such as \{'model': \(x,\)\}", lambda: shipped.ModelSummary(inputs=torch.ones(2))),
    (r"ranks=0 .*Use ranks=\[0\], or None for all", lambda: shipped.Profiler(ranks=0)),
    (r"target=Tanh\(\) is not a name", lambda: shipped.WeightTransfer("a", torch.nn.Tanh())),
    ("flops_per_sample='6' is .* Or a function of the trainer", lambda: shipped.Throughput(flops_per_sample="6")),
    ("unit='minutes'.*'seconds'", lambda: shipped.Every(1, "minutes", nothing)),
    ("'print' cannot be called", lambda: shipped.Every(1, "steps", "print")),
    ("models='model'", lambda: shipped.EMA(models="model")),
    ("device='cuda'", lambda: shipped.EMA(device="cuda")),
    ("min_delta=nan", lambda: shipped.EarlyStopping(min_delta=float("nan"))),
    ("both 'a'", lambda: shipped.WeightTransfer("a", "a")),
    ("modules='attention'", lambda: shipped.ActivationStats(modules="attention")),
    (r"modules='\(' is not a regular expression", lambda: shipped.ActivationStats(modules=["("])),
    ("flops_per_sample", lambda: shipped.Throughput(flops_per_token=1.0, tokens_per_sample=1, flops_per_sample=1.0)),
]


@pytest.mark.parametrize(("message", "make"), WRONG)
def test_an_argument_that_cannot_work_is_named_when_it_is_made(message: str, make: Callable[[], dt.Callback]) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_callback_without_a_name_is_refused_by_the_collection() -> None:
    class Forgets(shipped.LoggingCallback):
        def __init__(self) -> None:
            self.every = 3

    with pytest.raises(ConfigError, match=r"Forgets has no name. Call super\(\).__init__\(name\) in its __init__"):
        dt.CallbackCollection([Forgets()])


def in_numbers(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def all_of_a_run(callback: dt.Callback, directory: Path, *, seed: int) -> dict[str, Any]:
    """What can be seen of a run with the callback, but how long anything took."""
    history: list[tuple[int, dict[str, float]]] = []

    class Keeps(dt.Callback):
        def on_log(self, trainer: Any, metrics: dict[str, float], step: int) -> None:
            timed = {name: 0.0 for name in metrics if name.startswith(("throughput/", "memory/"))}
            history.append((step, metrics | timed))

    directory.mkdir()
    PRINTED.truncate(PRINTED.seek(0))
    with contextlib.chdir(directory), make([callback, Keeps()], seed=seed) as trainer:
        trainer.fit()
        return {
            "history": history,
            "model": in_numbers(weights(trainer.model)),
            "teacher": in_numbers(weights(trainer.teacher)),
            "state": callback.state_dict(),
            "tensors": in_numbers(callback.checkpoint_tensors()),
            "files": sorted(str(path) for path in Path().rglob("*")),
            "printed": re.sub(
                r"waits for data \S+ \| |[\d.]+( \w)? (?=(steps|samples)/s)|(?<=eta )\S+|(?<=took )\S+",
                "",
                PRINTED.getvalue(),
            ),
        }


@pytest.mark.parametrize("name", FACTORIES)
def test_after_one_trainer_it_serves_another(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(callback: dt.Callback, number: int) -> dict[str, Any]:
        capsys.readouterr()
        found = all_of_a_run(callback, tmp_path / str(number), seed=0)
        return found | {"output": capsys.readouterr().out}

    expected, served = run(FACTORIES[name](), 0), FACTORIES[name]()
    with pytest.raises(RuntimeError, match="the eighth window"):
        trained([served], tmp_path / "fails", kind=Fails, seed=1)
    for number in (1, 2):  # after one that has failed, and after one that was trained to its end
        found = run(served, number)
        for part, value in expected.items():
            assert found[part] == value, part


@pytest.mark.pitfall(51)
@pytest.mark.parametrize("name", FACTORIES)
def test_what_it_overrides_is_dispatched_alone(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    callback = FACTORIES[name]()
    own = {key for cls in type(callback).__mro__[: type(callback).__mro__.index(dt.Callback)] for key in vars(cls)}
    trainer = make([callback])  # whose constructor builds the table, and starts nothing
    recorded = {event: trainer._runtime.recorder.listeners(event, is_main=True) for event in EVENTS}
    heard = {event for event in EVENTS if len(trainer._runtime.events[event]) > len(recorded[event])}
    assert heard == own & set(EVENTS)
    assert f"| {name} |" in trainer.describe()
    assert not list(tmp_path.iterdir())
    capsys.readouterr()


def all_together(directory: str) -> tuple[dict[str, Tensor], Sequence[str]]:
    """On each of two ranks: a sharded run with one of each, stopped and resumed; its weights, and names of what was
    logged."""
    recorder = Recorder()
    trained([make_one() for make_one in FACTORIES.values()], Path(directory), batch_size=4, max_steps=6)
    everything = [*(make_one() for make_one in FACTORIES.values()), recorder]
    return trained(everything, Path(directory), batch_size=4), names(recorder, "")
