"""What differs by rank and must not is named on every rank before the first step; what may differ is not."""

import os
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torchmetrics
from torch.utils.data import DataLoader, Dataset

import dream_trainer as dt
from dream_trainer import callbacks as cb
from tests.api import DistributedDataLoader, PerRankLoader, RanksDifferError
from tests.trainer.small import Samples, Sharded, Spread, Validates, batches, fit, make_config, network, outcome, told
from tests.worlds import run_world

ROWS = torch.arange(36.0).view(12, 3).double()


class Rows(Dataset[Any]):
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return ROWS[self.rows[index]], ROWS[self.rows[index], :1], self.rows[index]


class Noisy(Rows):
    """The same rows on every rank, with draws from the global generators and from one of each rank's own."""

    def __init__(self, rows: list[int], rank: int) -> None:
        super().__init__(rows)
        self.own = np.random.default_rng(rank)
        self.home = f"/scratch/rank{rank}"

    def __getitem__(self, index: int) -> Any:
        x, y, number = super().__getitem__(index)
        return x + torch.rand(3) + random.random() + self.own.random(), y, number, f"{self.home}/{number}.png"


class Spare(Spread):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return super().training_step(batch[:3], batch_idx)


class Validated(Validates, Spread):
    config: Any


class Scheduled(Spread):
    def configure_schedulers(self) -> None:
        steps = 10 + self.world.rank
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)


def config(**training: Any) -> Any:
    return make_config(**({"n_epochs": 1} | training))


def loader(length: int = 12, size: int = 2) -> DistributedDataLoader:
    return DistributedDataLoader(Samples(length), size, shuffle=True)


def wrong(rank: int) -> dict[str, Callable[[], dt.BaseTrainer]]:
    mine = Rows(list(range(12))[rank::2])
    shuffled = random.Random(rank).sample(range(12), 12)
    return {
        r"seed \(7 on rank 0; 8 on rank 1\)": lambda: Spread(make_config(seed=7 + rank, n_epochs=1), loader()),
        r"training_parameters.max_steps \(3 .*; 4 ": lambda: Spread(config(max_steps=3 + rank), loader()),
        r"training loader: batch size \(2 .*; 3 ": lambda: Spread(config(), loader(12, 2 + rank)),
        r"training loader: samples \(12 .*; 10 .*split": lambda: Spread(config(), loader(12 - 2 * rank)),
        r"training loader: kind \(.*DistributedDataLoader on rank 0; .*PerRankLoader": lambda: Spread(
            config(), PerRankLoader(batches(3)) if rank else loader()
        ),
        r"validation loaders .* on rank 0; none on rank 1": lambda: Validated(
            config(), loader(), {} if rank else loader()
        ),
        r"optimizer 'optimizer', group 0: lr \(0.1 .*; 0.2 ": lambda: Spread(
            config(), loader(), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1 * (1 + rank))
        ),
        r"scheduler 'schedule': T_max \(10 .*; 11 ": lambda: Scheduled(config(), loader()),
        r"of the dataset of training \(Rows\) is another one on rank 1 than on rank 0": lambda: Spread(
            config(), DataLoader(Rows(shuffled), 2, num_workers=1, multiprocessing_context="fork")
        ),
        r"of the dataset of validation 'b' \(Rows\)": lambda: EvalSpread(
            config(), loader(), {"a": loader(), "b": DataLoader(mine, 1)}
        ),
    }


class EvalSpread(Validates, Spread, dt.EvalMixin):
    pass


class CountsRows(dt.Callback):
    """Counts what its rank has seen, and what all have; and numbers that each process has in another order."""

    def __init__(self) -> None:
        self.own = self.of_all = 0

    def post_train_step(self, trainer: Any) -> None:
        self.own += trainer.world.rank + 1
        self.of_all += 1

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own, "of_all": self.of_all, "names": {str(n) for n in range(20)}}


class KeepsState(Spread, dt.CheckpointMixin):
    def state_dict(self) -> dict[str, Any]:
        return {"level": 3, "loss": self.losses[-1] if self.losses else 0.0}

    def rank_state_dict(self) -> dict[str, Any]:
        return {"rank": self.world.rank}

    def configure_models(self) -> None:
        super().configure_models()
        self.register_state("rows", lambda: {"seen": self.seen}, lambda saved: None)


class KeepsEqualState(Spread, dt.LoggerMixin, dt.EvalMixin, dt.CheckpointMixin):
    """What the framework itself keeps, and a callback that is rank 0's alone."""

    def state_dict(self) -> Any:
        return [3]  # not as it is declared, and yet saved and given back


def saved_with(kind: type, callbacks: list[dt.Callback]) -> list[str]:
    checkpoint = dt.CheckpointParameters(save_every_n_steps=2)
    of_run = make_config(experiment=kind.__name__, max_steps=4, callbacks=callbacks, checkpoint=checkpoint)
    with told() as lines:
        fit(kind(of_run, loader()))
    return [line for line in lines if "on a resume" in line]


def state_of_ranks() -> list[list[str]]:
    rank = int(os.environ["RANK"])
    return [
        saved_with(KeepsState, [CountsRows()]),
        saved_with(KeepsEqualState, [cb.EMA(), *([] if rank else [CountsRows()])]),
    ]


def test_state_that_only_rank_0_would_keep_is_named_once() -> None:
    (told, silent), (other, other_silent) = run_world(state_of_ranks, 2)
    (line,) = told
    assert "CountsRows.state_dict(), register_state('rows'), state_dict(). " in line
    assert "rank_state_dict()" in line
    assert (silent, other, other_silent) == ([], [], [])


def right(rank: int) -> dict[str, Callable[[], dt.BaseTrainer]]:
    own = [dt.Callback()] if rank else []
    return {
        "augmentation in workers": lambda: Spare(
            config(), DataLoader(Noisy(list(range(12)), rank), 2, num_workers=1, multiprocessing_context="fork")
        ),
        "callbacks": lambda: Spread(make_config(n_epochs=1, callbacks=own), loader()),
    }


NAMES = [f"name{number}" for number in range(6)]
LAYERS = dict(zip(NAMES, (nn.Tanh, nn.GELU, nn.SiLU, nn.ReLU, nn.Sigmoid, nn.Softsign), strict=True))
Parts = list[tuple[str, nn.Module]]


def ordered(rank: int) -> list[str]:
    """As a set of strings, whose order each process has for itself."""
    return NAMES[::-1] if rank else NAMES


class Mixed(nn.Module):
    def __init__(self, parts: Parts, buffers: Sequence[str] = ()) -> None:
        super().__init__()
        self.body, self.parts = network(), nn.ModuleDict(parts)
        for name in buffers:
            self.register_buffer(name, torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        return self.body(x)


class OneMetricEach(Spread, dt.EvalMixin):
    def configure_metrics(self) -> None:
        for name in ordered(self.world.rank):
            setattr(self, name, torchmetrics.MeanMetric())


def misordered(rank: int) -> dict[str, Callable[[], dt.BaseTrainer]]:
    order = ordered(rank)

    def of(make: Callable[[], nn.Module], base: type = Spread) -> Callable[[], Any]:
        cls = type("Made", (base,), {"configure_models": lambda self: setattr(self, "model", make())})
        return lambda: cls(config(), loader())

    def optimized(groups: Callable[[list[nn.Parameter]], Any]) -> Callable[[], Any]:
        def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
            parameters = list(model.parameters())
            return torch.optim.SGD(groups([parameters[int(name[4:])] for name in order]), lr=0.1)

        return lambda: Spread(config(), loader(), make_optimizer=make_optimizer)

    def linears() -> Parts:
        return [(name, nn.Linear(3, 3).double()) for name in order]

    part = r"parts\.name\d\.weight float64 \[3, 3\]"
    return {
        rf"parameter 6 of self\.model \({part} on rank 0; {part} on rank 1\).*sorted": of(lambda: Mixed(linears())),
        rf"parameter \d of self\.model \({part} on rank 0; {part} on rank 1\)": of(lambda: Mixed(linears()), Sharded),
        r"module \d+ of self\.model \(parts\.\d: \w+ on rank 0; parts\.\d: \w+ on": of(
            lambda: Mixed([(str(index), LAYERS[name]()) for index, name in enumerate(order)])
        ),
        r"buffer 0 of self\.model \(name\d float64 \[3\] on rank 0; name\d .* on rank 1\)": of(
            lambda: Mixed([], order)
        ),
        r"optimizer 'optimizer', group 0, parameter \d \(model\.[\w.]+ on rank 0; model\.": optimized(list),
        r"optimizer 'optimizer', group \d, parameter 0 \(model\.[\w.]+ on rank 0; model\.": optimized(
            lambda parameters: [{"params": [parameter]} for parameter in parameters]
        ),
        r"metrics \(name\d, name\d.* on rank 0; name\d": lambda: OneMetricEach(config(), loader()),
    }


def try_each() -> tuple[dict[str, str], ...]:
    rank = int(os.environ["RANK"])
    found: tuple[dict[str, str], ...] = ({}, {}, {})
    trainers = []
    for messages, kinds in zip(found, (wrong(rank), misordered(rank), right(rank)), strict=True):
        for name, make in kinds.items():
            trainers.append(make())
            messages[name] = outcome(trainers[-1])
    for trainer in trainers:
        trainer.close()
    return found


@pytest.fixture(scope="module")
def heard() -> list[tuple[dict[str, str], ...]]:
    """What each rank heard of trainers that are wrong, misordered and right."""
    return run_world(try_each, 2)


def assert_named_on_all(told: dict[str, str], other: dict[str, str]) -> None:
    assert told == other
    for pattern, message in told.items():
        assert message.startswith(RanksDifferError.__name__), f"{pattern}: {message}"
        assert re.search(pattern, message), f"{pattern}: {message}"


@pytest.mark.pitfall(72)
def test_what_must_be_equal_is_compared_before_the_first_step(heard: list[tuple[dict[str, str], ...]]) -> None:
    assert_named_on_all(*(of_rank[0] for of_rank in heard))
    assert set(heard[0][2].values()) == {"trained"}


@pytest.mark.pitfall(89)
def test_what_ranks_build_in_different_orders_is_named_before_the_first_step(
    heard: list[tuple[dict[str, str], ...]],
) -> None:
    assert_named_on_all(*(of_rank[1] for of_rank in heard))


class Planned(Spread):
    def configure_schedulers(self) -> None:
        assert self.total_steps is not None
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, self.total_steps)


def uneven_lengths() -> list[Any]:
    rank = int(os.environ["RANK"])
    data = PerRankLoader(batches(5 if rank else 3))
    with Planned(config(n_epochs=2), data) as trainer:
        trainer.fit()
        return [trainer.steps_per_epoch, trainer.total_steps, trainer.global_step, trainer.schedule.state_dict()]


@pytest.mark.pitfall(72)
def test_unequal_loaders_of_single_ranks_give_all_one_plan() -> None:
    first, second = run_world(uneven_lengths, 2)
    assert first == second
    assert first[:3] == [3, 6, 6]
