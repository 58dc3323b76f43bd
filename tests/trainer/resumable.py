"""A run with everything in it that a resume could get wrong, trained in one go or in parts, and what it left behind.

Dropout, batch norm, a shuffled loader with workers, augmentation and steps that draw from torch, numpy and python,
accumulation with short and uneven last windows, two parameter groups of AdamW, a scheduler with integer keys,
validation by epochs and by steps, a callback, the user's own state, and every line of the log.
"""

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, default_collate

import dream_trainer as dt
from tests.api import DistributedDataLoader, PerRankLoader, read_jsonl
from tests.data.samples import LiveShuffle
from tests.trainer.arithmetic import full
from tests.trainer.small import run_config

FEATURES, CLASSES = 5, 3
STEPS_PER_EPOCH, EPOCHS = 6, 2
LAST_STEP = STEPS_PER_EPOCH * EPOCHS


class Augmented(Dataset[tuple[Tensor, int, int]]):
    """Labelled points, moved a little at each visit by draws from all three generators, each with its number."""

    def __init__(self, length: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(3)
        self.points = torch.randn(length, FEATURES, dtype=torch.float64, generator=generator)
        self.labels = torch.randint(CLASSES, (length,), generator=generator).tolist()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        noise = torch.randn(FEATURES) + np.random.normal() + random.gauss(0.0, 1.0)
        return self.points[index] + self.noise * noise, self.labels[index], index


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Network(nn.Module):
    """Two blocks to shard by; batch norm keeps statistics that differ between ranks."""

    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(FEATURES) if batch_norm else nn.Identity()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.batch_norm(x))


@dataclass(kw_only=True)
class Config(dt.DreamTrainerConfig):
    """What the runs of these tests differ in."""

    loader: str = "own"
    """"own", "plain", "stateful": a loader of another kind that keeps its own state, or "live": one that hands it out
    as it is, and has more data on later ranks."""
    workers: int = 2
    samples: int = 46
    batch_size: int = 4
    double: bool = False
    random_layers: bool = True
    noise: float = 0.1
    drop_last: bool = False


class History(dt.Callback):
    """Every norm and every validation, through all restarts."""

    def __init__(self) -> None:
        self._norms: list[tuple[int, float]] = []
        self._validations: list[tuple[int, dict[str, float]]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self._norms, "validations": self._validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms, self._validations = list(state["norms"]), list(state["validations"])

    def post_train_step(self, trainer: Any) -> None:
        self._norms.append((trainer.global_step, trainer.record[-1]["norm"]))

    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._validations.append((trainer.global_step, metrics))


def after_each_look_at_saves(trainer: dt.DreamTrainer, action: Callable[[], None]) -> None:
    """Calls `action` between two windows, where no event is: what it asks for is heard before the next window."""
    saver, look = trainer._runtime.saver, trainer._runtime.saver.save_if_due

    def look_and_act(**when: Any) -> None:
        look(**when)
        action()

    saver.save_if_due = look_and_act  # type: ignore[method-assign]


class Resumable(dt.DreamTrainer):
    """Records what each optimizer step of this process saw and did."""

    config: Config

    def __init__(self, config: Config, stop_after: int | None = None) -> None:
        super().__init__(config)
        self.stop_after = stop_after
        self.record: list[dict[str, Any]] = []
        self.loaded: dict[str, Tensor] = {}
        self.own_count, self.own_draws = 0, [0.0]

    def pre_fit(self) -> None:
        self._ask_for_stop()

    def post_setup(self) -> None:
        after_each_look_at_saves(self, self._ask_for_stop)

    def _ask_for_stop(self) -> None:
        if self.stop_after is not None and self.global_step == self.stop_after:
            self.request_stop("the test says so")

    def configure_models(self) -> None:
        dropout = 0.3 if self.config.random_layers else 0.0
        self.model = Network(dropout, batch_norm=self.config.random_layers)
        if self.config.double:
            self.model.double()

    def configure_dataloaders(self) -> tuple[Any, Any]:
        data = Augmented(self.config.samples, self.config.noise)
        validation = DistributedDataLoader(Augmented(7, self.config.noise), 2, drop_last=False)
        size = self.config.batch_size
        # A process that was spawned, as a test's ranks are, spawns its own by default, which takes seconds for each.
        workers: dict[str, Any] = {"num_workers": self.config.workers}
        if self.config.workers:
            workers["multiprocessing_context"] = "fork"
        if self.config.loader == "plain":
            return DataLoader(data, size, shuffle=True, **workers), validation
        if self.config.loader == "stateful":
            return PerRankLoader(stateful_loader(data, size, workers)), validation
        if self.config.loader == "live":  # and more of it on later ranks
            own = Augmented(self.config.samples + 8 * self.world.rank, self.config.noise)
            return PerRankLoader(LiveBatches(own, size)), validation
        return DistributedDataLoader(data, size, shuffle=True, drop_last=self.config.drop_last, **workers), validation

    def configure_optimizers(self) -> None:
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.02, fused=True)

    def configure_schedulers(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 8, 8, 10], gamma=0.5)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        x, labels, numbers = batch
        if not self.record or "norm" in self.record[-1]:
            self.record.append({"step": self.global_step + 1, "losses": [], "ids": [], "draws": [], "sums": []})
        current = self.record[-1]
        loss = cross_entropy(self.model(x.to(self.model.head.weight.dtype)), labels)
        self.backward(loss, weight=len(labels))
        current["losses"].append(loss.item())
        current["ids"].append(numbers.tolist())
        current["sums"].append(x.sum().item())
        current["draws"].append([random.random(), np.random.rand(), torch.rand(()).item()])
        self.own_count += 1
        self.own_draws[0] += current["draws"][-1][1]
        self.log("draw", current["draws"][-1][0])
        if not self.is_accumulating_gradients:
            current["lr"] = self.optimizer.param_groups[0]["lr"]
            current["norm"] = float(self.step(self.model, self.optimizer, self.scheduler))
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        x, labels, _ = batch
        scores = self.model(x.to(self.model.head.weight.dtype))
        return {"loss": cross_entropy(scores, labels), "noise": torch.rand(())}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"own_count": self.own_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.own_count = state["own_count"]

    def rank_state_dict(self) -> dict[str, Any]:
        return super().rank_state_dict() | {"own_draws": self.own_draws}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        super().load_rank_state_dict(state)
        self.own_draws = list(state["own_draws"])

    def on_load(self, path: Path) -> None:
        self.loaded = state_tensors(self)


class LiveBatches(LiveShuffle):
    """Samples in batches."""

    def __init__(self, data: Augmented, size: int) -> None:
        super().__init__(len(data), size, capacity=9)
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (default_collate([self.data[number] for number in numbers]) for numbers in super().__iter__())


def stateful_loader(data: Dataset[Any], size: int, workers: dict[str, Any]) -> Any:
    """A loader that cannot be rebuilt as ours, because of its sampler, and resumes by its own state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(len(data))], len(data))  # type: ignore[arg-type]
    return StatefulDataLoader(data, size, sampler=sampler, **workers)


def state_tensors(trainer: Any) -> dict[str, Tensor]:
    """Whole copies of parameters, buffers and optimizer state by name; a collective where they are sharded."""
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    found = dict(trainer.model.named_parameters()) | dict(trainer.model.named_buffers())
    for parameter, state in trainer.optimizer.state.items():
        found |= {f"{names[parameter]}.{key}": value for key, value in state.items()}
    return {name: full(tensor).detach().clone() for name, tensor in found.items()}


def random_digest() -> str:
    """The state of the three global generators, as a short text."""
    states = (torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes())
    return hashlib.sha256(repr(states).encode()).hexdigest()


def make_config(
    experiment: str,
    *,
    seed: int = 42,
    checkpoint: dt.CheckpointParameters | None = None,
    log_every: int = 1,
    callbacks: Sequence[dt.Callback] = (),
    own: dict[str, Any] | None = None,
    **training: Any,
) -> Config:
    """The config of one run; further arguments are training parameters."""
    defaults: dict[str, Any] = {
        "n_epochs": EPOCHS,
        "gradient_accumulation_steps": 2,
        "val_every_n_steps": 4,
        "val_every_n_epochs": 1,
    }
    return run_config(
        experiment,
        Config,
        seed=seed,
        callbacks=[History(), *callbacks],
        training_parameters=dt.TrainingParameters(**(defaults | training)),
        checkpoint_parameters=checkpoint or dt.CheckpointParameters(save_every_n_epochs=None),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",), log_every_n_steps=log_every),
        **own or {},
    )


def train(config: Config, stop_after: int | None = None) -> dict[str, Any]:
    """Trains until the run ends or is stopped, in a world launched for it, and tells what happened.

    The generators are disturbed before, as a new process would find them in any state.
    """
    torch.manual_seed(int.from_bytes(os.urandom(2)))
    random.seed()
    np.random.seed()
    trainer = Resumable(config, stop_after)
    trainer.fit()
    return closed(trainer)


def closed(trainer: Resumable) -> dict[str, Any]:
    """Closes a trainer that was trained, and tells what happened."""
    result = {
        "record": trainer.record,
        "loaded": trainer.loaded,
        "tensors": state_tensors(trainer),
        "progress": {k: v for k, v in trainer.progress.state_dict().items() if k != "elapsed_seconds"},
        "scheduler": trainer.scheduler.state_dict(),
        "history": trainer.get_callback(History).state_dict(),
        "best": dict(trainer.best),
        "own": (trainer.own_count, trainer.own_draws),
        "random": random_digest(),
    }
    trainer.close()
    result["log"] = log_lines(trainer.run_dir) if trainer.world.is_main else None
    return result


def log_lines(run_dir: Path) -> list[dict[str, float]]:
    """The run's log without the clock."""
    return [
        {name: value for name, value in line.items() if name != "time"}
        for line in read_jsonl(run_dir / "metrics.jsonl")
    ]


def train_in_parts(experiment: str, stops: Sequence[int], **options: Any) -> dict[str, Any]:
    """Trains up to each of `stops`, each time by a new trainer in a new world, and then to the end; one result."""
    record: list[dict[str, Any]] = []
    for stop in (*stops, None):
        result = train(make_config(experiment, **options), stop)
        record += result["record"]
        assert stop is None or result["progress"]["global_step"] == stop
    return result | {"record": record}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What two results do not have in common, bit for bit; what was loaded is not compared."""
    wrong = [key for key in expected if key not in ("tensors", "loaded") and found[key] != expected[key]]
    if found["tensors"].keys() != expected["tensors"].keys():
        return [*wrong, "names"]
    names = [name for name, value in expected["tensors"].items() if not torch.equal(found["tensors"][name], value)]
    return wrong + names


def run_plans(directory: str, plans: dict[str, Sequence[int]], options: dict[str, Any]) -> dict[str, Any]:
    """Runs each plan (a list of stops) in this world, one after the other, in `directory`."""
    os.chdir(directory)
    return {name: train_in_parts(name, stops, **options) for name, stops in plans.items()}
