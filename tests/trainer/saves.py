"""A run that saves and notes what it is told of checkpoints: what the tests of saving and resuming share."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dream_trainer as dt
from dream_trainer.checkpoint import saver
from tests.api import DistributedDataLoader, Ranks, Snapshot, load_tensors, tensor_metadata
from tests.trainer import small
from tests.trainer.small import Batch, Samples, Validates, fit, weights

STEPS = 6  # of an epoch: 12 samples, batches of 2


@dataclass
class Config(small.Config):
    learning_rate: float = 0.1


class Saves(Validates, small.Sharded, dt.EvalMixin, dt.CheckpointMixin):
    """Notes what it is told of checkpoints."""

    config: Config

    def __init__(self, config: Config, *, length: int = 2 * STEPS, batch_size: int = 2) -> None:
        train = DistributedDataLoader(Samples(length), batch_size, shuffle=True)
        super().__init__(config, train, DistributedDataLoader(Samples(5), 2, drop_last=False), make_optimizer=self.sgd)
        self.saved: list[int] = []
        self.loaded: list[str] = []

    def sgd(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.config.learning_rate, momentum=0.9)

    def on_save(self, path: Path) -> None:
        self.saved.append(int(path.name.removeprefix("step_")))

    def on_load(self, path: Path) -> None:
        self.loaded.append(path.name)


def make_config(
    *,
    experiment: str = "run",
    learning_rate: float = 0.1,
    seed: int = 42,
    callbacks: Sequence[dt.Callback] = (),
    training: dict[str, Any] | None = None,
    **checkpoint: Any,
) -> Config:
    """A run of one epoch unless `training` says otherwise; further arguments are checkpoint parameters."""
    return small.run_config(
        experiment,
        Config,
        group="checkpoint",
        learning_rate=learning_rate,
        seed=seed,
        callbacks=dt.CallbackCollection(callbacks),
        training_parameters=dt.TrainingParameters(**(training or {"n_epochs": 1})),
        checkpoint_parameters=dt.CheckpointParameters(**checkpoint),
    )


def run(**options: Any) -> Saves:
    return fit(Saves(make_config(**options)))


def steps_of(trainer: Saves) -> list[int]:
    return [manifest.step for manifest in trainer.checkpoints()]


NOTHING: dict[str, Any] = {"save_every_n_epochs": None, "save_at_end": False}
"""Checkpoint parameters of a run that saves only what it is asked to."""


class Validated(dt.Callback):
    """Notes each validation, through all restarts."""

    def __init__(self) -> None:
        self._found: list[tuple[int, dict[str, float]]] = []

    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._found.append((trainer.global_step, metrics))

    def state_dict(self) -> dict[str, Any]:
        return {"found": self._found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found = [(step, metrics) for step, metrics in state["found"]]


VALIDATING: dict[str, Any] = {"n_epochs": 2, "val_every_n_steps": 3}
"""Training parameters of two epochs, validated at steps 3, 6, 9 and 12."""


def assert_as(straight: Saves, trainer: Saves) -> None:
    """The same in weights, validations and counters, bit for bit."""
    found, expected = weights(trainer.model), weights(straight.model)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert trainer.get_callback(Validated)._found == straight.get_callback(Validated)._found
    clockless = [t.progress.state_dict() | {"elapsed_seconds": 0} for t in (trainer, straight)]
    assert clockless[0] == clockless[1]


class Scripted(Saves):
    """Validates after each step, with the losses that the test gives for steps 1, 2, ...; None logs nothing."""

    script: tuple[float | None, ...] = ()
    stop_after: int | None = None

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        value = self.script[self.global_step - 1] if self.global_step <= len(self.script) else None
        return {} if value is None else {"loss": torch.tensor(value, dtype=torch.float64)}

    def pre_train_batch(self, batch: Any, batch_idx: int) -> None:
        if self.stop_after is not None and self.global_step == self.stop_after - 1:
            self.request_stop("the test says so")


def fit_scripted(
    script: tuple[float | None, ...], *, stop_after: int | None = None, val_every: int = 1, **checkpoint: Any
) -> Scripted:
    training = {"max_steps": len(script), "val_every_n_steps": val_every, "val_every_n_epochs": None}
    parameters = {"save_every_n_epochs": None, "best_metric": "val/loss"} | checkpoint
    # One batch of validation, so that its value is the metric's, bit for bit.
    trainer = Scripted(make_config(training=training | {"val_steps_per_epoch": 1}, **parameters))
    trainer.script, trainer.stop_after = script, stop_after
    fit(trainer)
    return trainer


def damage(path: Path) -> str:
    """Flips one byte in the middle of the tensors; the file's name."""
    (file,) = path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.name


@contextmanager
def before_writing(act: Callable[[Snapshot], None]) -> Iterator[None]:
    """Calls `act` with each snapshot in the thread that writes it, before anything is on the disk."""
    write = saver.write_checkpoint

    def act_and_write(root: Path, snapshot: Snapshot, **options: Any) -> Path:
        act(snapshot)
        return write(root, snapshot, **options)

    with mock.patch.object(saver, "write_checkpoint", act_and_write):
        yield


class Gate:
    """Holds a writer until training has gone on to some step; nobody waits for ever."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def wait(self) -> None:
        assert self._opened.wait(timeout=60), "training did not go on while the writer was held"


def wait_for_writer() -> None:
    """Returns when no checkpoint is being written."""
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint writer"):
            thread.join()


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint that ranks share, whole."""
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in tensor_metadata(path).items()}
    load_tensors(path, tensors, world=Ranks.alone())
    return tensors
