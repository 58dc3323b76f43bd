"""Models, optimizers and metrics that ranks build in different orders are named on every rank before the first step.

Forked ranks share one order of sets of strings, so these are fresh interpreters, each with a hash seed of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torchmetrics
from torch import Tensor

import dream_trainer as dt
from tests.api import World
from tests.trainer.small import ROOT, WIDTH, Batch, Sharded, Spread, by_hand, make_config, network, weights
from tests.trainer.test_rank_differences import loader
from tests.worlds import free_port, rank_environment

NAMES = {f"name{number}" for number in range(6)}  # each process has an order of its own
SEEDS = ("1", "2")


class Mixed(nn.Module):
    """A network with parts that are made for each of `NAMES`."""

    def __init__(self, parts: Callable[[], Sequence[tuple[str, nn.Module]]], buffers: Sequence[str] = ()) -> None:
        super().__init__()
        self.body = network()
        self.parts = nn.ModuleDict(parts())
        for name in buffers:
            self.register_buffer(name, torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return self.body(x)


def linears(names: Any) -> Callable[[], Sequence[tuple[str, nn.Module]]]:
    return lambda: [(name, nn.Linear(WIDTH, WIDTH).double()) for name in names]


def activations(names: Any) -> Callable[[], Sequence[tuple[str, nn.Module]]]:
    """No parameters, and names that say nothing."""
    kinds = dict(zip(sorted(NAMES), (nn.Tanh, nn.GELU, nn.SiLU, nn.ReLU, nn.Sigmoid, nn.Softsign), strict=True))
    return lambda: [(str(index), kinds[name]()) for index, name in enumerate(names)]


class FromParts:
    """Mix in: the model is `make()`."""

    make: Callable[[], nn.Module]

    def configure_models(self) -> None:
        self.model = type(self).make()


def parameters_of(model: nn.Module, order: Any) -> list[nn.Parameter]:
    everything = list(model.parameters())
    return [everything[int(name[4:])] for name in order]


class OneMetricEach(Spread, dt.EvalMixin):
    def configure_metrics(self) -> None:
        for name in NAMES:
            setattr(self, name, torchmetrics.MeanMetric())


def trainers() -> dict[str, Callable[[], Any]]:
    """By what must be named in the message."""

    def of(make: Callable[[], nn.Module], base: type = Spread) -> Callable[[], Any]:
        cls = type("FromSet", (FromParts, base), {"make": staticmethod(make)})
        return lambda: cls(make_config(n_epochs=1), loader())

    def optimized(make_optimizer: Callable[[nn.Module], Any]) -> Callable[[], Any]:
        return lambda: Spread(make_config(n_epochs=1), loader(), make_optimizer=make_optimizer)

    part = r"parts\.name\d\.weight float64 \[3, 3\]"
    return {
        rf"parameter 6 of self\.model \({part} on rank 0; {part} on rank 1\).*sorted": of(
            lambda: Mixed(linears(NAMES))
        ),
        rf"parameter \d of self\.model \({part} on rank 0; {part} on rank 1\)": of(
            lambda: Mixed(linears(NAMES)), Sharded
        ),
        r"module \d+ of self\.model \(parts\.\d: \w+ on rank 0; parts\.\d: \w+ on": of(
            lambda: Mixed(activations(NAMES))
        ),
        r"buffer 0 of self\.model \(name\d float64 \[3\] on rank 0; name\d .* on rank 1\)": of(
            lambda: Mixed(linears(()), [*NAMES])
        ),
        r"optimizer 'optimizer', group 0, parameter \d \(model\.[\w.]+ on rank 0; model\.": optimized(
            lambda model: torch.optim.SGD(parameters_of(model, NAMES), lr=0.1)
        ),
        r"optimizer 'optimizer', group \d, parameter 0 \(model\.[\w.]+ on rank 0; model\.": optimized(
            lambda model: torch.optim.SGD([{"params": [p]} for p in parameters_of(model, NAMES)], lr=0.1)
        ),
        r"metrics \(name\d, name\d.* on rank 0; name\d": lambda: OneMetricEach(make_config(n_epochs=1), loader()),
    }


class Recorded(Spread):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.given = getattr(self, "given", [])
        self.given.append([part.tolist() for part in batch[:2]])
        return super().training_step(batch, batch_idx)


def try_each(into: str) -> None:
    """One rank: the messages, and weights and data of a run whose order is the same."""
    told = {}
    kept = []
    with mock.patch.object(World, "fail", return_value=None):
        for pattern, make in trainers().items():
            trainer = make()
            kept.append(trainer)
            try:
                trainer.fit()
                told[pattern] = "trained"
            except Exception as error:
                told[pattern] = f"{type(error).__name__}: {error}"
    sorted_names = lambda model: torch.optim.SGD(parameters_of(model, sorted(NAMES)), lr=0.1, momentum=0.9)  # noqa: E731
    right = Recorded(make_config(n_epochs=1), loader(), make_optimizer=sorted_names)
    right.fit()
    trained = {name: value.tolist() for name, value in weights(right.model).items()}
    for trainer in (*kept, right):
        trainer.close()
    rank = os.environ["RANK"]
    (Path(into) / f"{rank}.json").write_text(json.dumps([[*NAMES], told, trained, right.given]))


def exact(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.pitfall(89)
def test_what_ranks_build_in_different_orders_is_named_before_the_first_step(tmp_path: Path) -> None:
    port = free_port()
    code = f"from tests.trainer.test_rank_order import try_each; try_each({str(tmp_path)!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment | rank_environment(rank, 2, port) | {"PYTHONHASHSEED": seed},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, seed in enumerate(SEEDS)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first[0] != second[0]
    assert first[1:3] == second[1:3]
    for pattern, message in first[1].items():
        assert message.startswith("RanksDifferError: "), f"{pattern}: {message}"
        assert re.search(pattern, message), f"{pattern}: {message}"
    of_ranks = [[[exact(part) for part in batch] for batch in one[3]] for one in (first, second)]
    by_one = by_hand([list(window) for window in zip(*of_ranks, strict=True)])
    for name, value in weights(by_one).items():
        torch.testing.assert_close(exact(first[2][name]), value, rtol=0, atol=1e-12)
