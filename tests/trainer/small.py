"""A small regression, as a user would write it, and the same by hand: what the trainer's behaviour tests share."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import dream_trainer as dt
from tests import api
from tests.api import CheckpointParameters, LoggerParameters
from tests.programs import run_programs

ROOT = Path(__file__).parent.parent.parent
WIDTH = 3
BY_BLOCKS = dt.FSDPParameters(min_group_mib=0)  # as models are sharded that are too large to be whole in steps
Batch = tuple[Tensor, Tensor, Tensor]


class Samples(torch.utils.data.Dataset[Batch]):
    """The first `length` of 64 pairs in float64, each with its number."""

    def __init__(self, length: int) -> None:
        assert length <= 64
        generator = torch.Generator().manual_seed(5)
        pairs = torch.randn(64, WIDTH + 1, dtype=torch.float64, generator=generator)
        self.x, self.y = pairs[:length, :WIDTH], pairs[:length, WIDTH:]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


def batches(count: int, size: int = 2) -> list[Batch]:
    """`count` batches of `size` samples, as a loader of its own kind: any iterable."""
    if count == 0:
        return []  # splitting nothing gives one empty part
    data = Samples(count * size)
    numbers = torch.arange(count * size)
    return list(zip(data.x.split(size), data.y.split(size), numbers.split(size), strict=True))


def network() -> nn.Module:
    """Two blocks of one class and a head, so that sharding has blocks to find; filled without random numbers."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
    return nn.Sequential(blocks, nn.Linear(WIDTH, 1)).double()


def fill(model: nn.Module) -> None:
    """The same weights for both sides, from no random number at all."""
    with torch.no_grad():
        for number, parameter in enumerate(dict(model.named_parameters()).values()):
            values = torch.arange(parameter.numel(), dtype=torch.float64) * 0.37 + number
            parameter.copy_(0.3 * torch.sin(values).reshape(parameter.shape))


def full(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def filled_network() -> nn.Module:
    model = network()
    fill(model)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum, so that a wrong step leaves a mark on all later ones."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that skips on the device."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@dataclass
class Config(
    dt.BaseTrainerConfig,
    dt.SetupConfigMixin,
    dt.FSDPConfigMixin,
    dt.PipelineParallelConfigMixin,
    dt.ContextParallelConfigMixin,
    dt.TensorParallelConfigMixin,
    dt.Float8ConfigMixin,
    dt.ActivationCheckpointingConfigMixin,
    dt.CompileConfigMixin,
    dt.EvalConfigMixin,
    dt.LoggerConfigMixin,
    dt.CheckpointConfigMixin,
):
    """Serves every trainer of these tests, whatever its mixins."""


@dataclass(kw_only=True)
class CaseConfig(dt.DreamTrainerConfig):
    case: Any = None
    """What is trained, and on which mesh."""


class Noting(dt.DreamTrainer):
    """Notes norms and what is logged."""

    config: CaseConfig

    def __init__(self, config: CaseConfig) -> None:
        super().__init__(config)
        self.norms: list[float] = []
        self.logged: dict[int, dict[str, float]] = {}

    def on_log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)


def make_config(
    *,
    experiment: str = "run",
    seed: int = 42,
    callbacks: Sequence[dt.Callback] = (),
    devices: dt.DeviceParameters | None = None,
    loggers: tuple[Any, ...] = (),
    log_every: int = 10,
    fsdp: dt.FSDPParameters | None = None,
    checkpoint: CheckpointParameters | None = None,
    **training: Any,
) -> Config:
    """A config on the CPU whose further arguments are training parameters."""
    return run_config(
        experiment,
        Config,
        seed=seed,
        callbacks=dt.CallbackCollection(callbacks),
        device_parameters=devices or dt.DeviceParameters(device="cpu"),
        fsdp_parameters=fsdp or dt.FSDPParameters(),
        training_parameters=dt.TrainingParameters(**training),
        logger_parameters=LoggerParameters(loggers=loggers, log_every_n_steps=log_every),
        **{} if checkpoint is None else {"checkpoint_parameters": checkpoint},
    )


def run_config(experiment: str = "run", cls: Callable[..., Any] = dt.DreamTrainerConfig, **fields: Any) -> Any:
    """A config of `cls` on the CPU that writes nothing, as far as its fields don't say otherwise."""
    defaults = {"project": "tests", "group": "trainer", "experiment": experiment}
    devices, loggers = dt.DeviceParameters(device="cpu"), LoggerParameters(loggers=())
    saves = CheckpointParameters(save_every_n_epochs=None, save_at_end=False)
    defaults |= {"device_parameters": devices, "logger_parameters": loggers, "checkpoint_parameters": saves}
    return cls(**defaults | fields)


DEVICES = {
    "pp": "pipeline_parallel",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
    "ep": "expert_parallel",
    "shard": "dp_shard",
    "replicate": "dp_replicate",
    "overlap": "overlap_reduce",
    "offload": "cpu_offload",
    "recompute": "activation_checkpointing",
    "precision": "precision",
    "compile": "compile",
}
"""Device parameters by the names that cases have for them."""


def case_config(case: Any, experiment: str, devices: dict[str, Any], training: dict[str, Any], **fields: Any) -> Any:
    """A config of a case that trains an epoch and logs each step, as far as the others don't say otherwise."""
    of_case = {name: getattr(case, short) for short, name in DEVICES.items() if hasattr(case, short)}
    steps = {"n_epochs": 1, "gradient_clip_norm": case.clip, "gradient_accumulation_steps": case.accumulation}
    return run_config(
        experiment,
        CaseConfig,
        device_parameters=dt.DeviceParameters(**{"device": "cpu"} | of_case | devices),
        training_parameters=dt.TrainingParameters(**steps | training),
        logger_parameters=LoggerParameters(loggers=(), log_every_n_steps=1),
        case=case,
        **fields,
    )


def fit(trainer: Any) -> Any:
    with trainer:
        trainer.fit()
    return trainer


def fit_each(trainers: Iterable[Any], found_in: Callable[[Any], Any]) -> list[Any]:
    """Trains one after the other; what is found in each before it closes."""
    found = []
    for trainer in trainers:
        with trainer:
            trainer.fit()
            found.append(found_in(trainer))
    return found


def error_of(trainer: Any, kind: type[Exception] = api.StepError) -> str:
    """What training fails with; without `fit`, out of which an error ends the other ranks' run too."""
    api.start(trainer._runtime)
    try:
        trainer._train()
    except kind as error:
        return str(error)
    return ""


def outcome(trainer: Any) -> str:
    """`trained`, or what `fit` fails with, which ends no other rank's run."""
    with mock.patch.object(api.World, "fail", return_value=None):
        try:
            trainer.fit()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "trained"


@contextmanager
def told() -> Iterator[list[str]]:
    """What is logged inside; for ranks, which have no fixtures."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dream_trainer").addHandler(handler)
    yield lines
    logging.getLogger("dream_trainer").removeHandler(handler)


class Sent(TorchDispatchMode):
    """Adds up the bytes that this rank sends, by what each collective's arguments cost, which goes by its name."""

    def __init__(self, **costs: Callable[..., float]) -> None:
        super().__init__()
        self.costs, self.n_bytes = {f"c10d.{name}.default": cost for name, cost in costs.items()}, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (cost := self.costs.get(str(func))) is not None:
            self.n_bytes += cost(*args)
        return func(*args, **(kwargs or {}))


def windows(length: int, size: int, n_batches: int) -> list[list[Batch]]:
    """The first samples in batches of `size`, of which a window has so many."""
    parts = batches(length // size, size)
    return [parts[first : first + n_batches] for first in range(0, len(parts), n_batches)]


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def train_by_hand(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    windows: Iterable[Sequence[Any]],
    loss_of: Callable[[Any, Any], Tensor] = mean_square,
    *,
    weight_of: Callable[[Any], float] = lambda batch: 1,
    clip: float | None = None,
) -> list[float]:
    """The loop as one writes it: each window's loss is the mean over its micro-batches, by their weights.

    Returns:
        The norm of the gradients of each window, before they were clipped; 0 where nothing has a weight.
    """
    norms = []
    for window in windows:
        total = sum(map(weight_of, window))
        if total:
            for batch in window:
                (loss_of(model, batch) * (weight_of(batch) / total)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf).item())
        for optimizer in [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers:
            if total:
                optimizer.step()
            optimizer.zero_grad()
    return norms


class Algorithm:
    """The user's part of a trainer; records which samples each window saw, its losses and norms."""

    make_model: Any = staticmethod(network)

    def __init__(
        self,
        config: Config,
        train: Any = None,
        val: Any = None,
        *,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    ) -> None:
        super().__init__(config)
        self.train_data, self.val_data, self.make_optimizer = train, val, make_optimizer
        self.seen: list[list[int]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.train_data, self.val_data

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if len(batch) > 2:
            self.seen.append(batch[2].tolist())
        loss = self.loss_of(batch)
        self.backward(loss, weight=self.weight_of(batch))
        self.losses.append(loss.item())
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}

    def loss_of(self, batch: Batch) -> Tensor:
        return mean_square(self.model, batch)

    def weight_of(self, batch: Batch) -> Any:
        return None


class Alone(Algorithm, dt.BaseTrainer):
    """One process; the model is built in `setup`."""

    def setup(self) -> None:
        self.model = self.make_model()
        fill(self.model)
        self.optimizer = self.make_optimizer(self.model)


class Built(Algorithm):
    """With what a SetupMixin asks for."""

    def configure_models(self) -> None:
        self.model = self.make_model()

    def init_weights(self) -> None:
        fill(self.model)

    def configure_optimizers(self) -> None:
        self.optimizer = self.make_optimizer(self.model)


class FromSeed(Built, dt.DreamTrainer):
    """With everything mixed in; its weights are those that the seed draws."""

    init_weights = dt.DreamTrainer.init_weights


class Spread(Built, dt.BaseTrainer, dt.SetupMixin):
    """Any number of processes, replicated."""


class Sharded(Spread, dt.FSDPMixin):
    """Any number of processes, sharded."""


def sharded(kind: type[Any]) -> type[Any]:
    """The same trainer with FSDPMixin."""
    return type(f"Sharded{kind.__name__}", (kind, dt.FSDPMixin), {})


class Validates:
    """Mix in: the loss over validation batches."""

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": mean_square(self.model, batch)}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Full copies of a model's parameters; a collective where they are sharded."""
    return {name: full(p).detach().clone() for name, p in model.named_parameters()}


def by_hand(
    windows: Sequence[Sequence[tuple[Any, ...]]], *, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
) -> nn.Module:
    model = filled_network()
    train_by_hand(model, make_optimizer(model), windows)
    return model


def train_on(optimizer: torch.optim.Optimizer, losses: Iterable[Tensor]) -> None:
    """One step of plain PyTorch for each of `losses`, which a generator computes from the weights of then."""
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_weights(found: dict[str, Tensor], expected: nn.Module | dict[str, Tensor]) -> None:
    """Equal to 1e-12, in float64."""
    by_name = weights(expected) if isinstance(expected, nn.Module) else expected
    torch.testing.assert_close(found, by_name, rtol=1e-12, atol=1e-12)


def run_ranks(code: str, world_size: int, cwd: Path, timeout: float = 60.0) -> list[tuple[int, str]]:
    """Runs `code` on bare ranks, without torchrun, until each has ended by itself.

    Returns:
        Exit status and standard error of each rank.
    """
    ended = run_programs(code, world_size, cwd, dict(os.environ), timeout)
    return [(rank.status, rank.error) for rank in ended]


def errors_of(function: Callable[..., Any], *args: Any) -> list[str]:
    """What each of two ranks ends with that calls a test's function, in the working directory."""
    code = f"from {function.__module__} import {function.__name__} as go; go(*{args!r})"
    ranks = run_ranks(code, 2, Path.cwd())
    assert [status for status, _ in ranks] == [1, 1], ranks
    return [error for _, error in ranks]
