"""A small regression and a small classification, and the same training as a plain loop: what these tests share."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dream_trainer.simple import Trainer

WIDTH, CLASSES, SAMPLES = 5, 3, 24


def classifier(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights at each call, whatever the global generators."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        return nn.Sequential(blocks, nn.Linear(WIDTH, CLASSES)).to(dtype)


def samples(count: int = SAMPLES, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Points and their classes."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=generator))


def batches(size: int = 4, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """The samples in order."""
    x, y = samples(dtype=dtype).tensors
    return list(zip(x.split(size), y.split(size), strict=True))


def ready(given: list[Any] | None = None) -> DataLoader[Any]:
    """A loader of batches that are ready, as `batches()` are."""
    return DataLoader(batches() if given is None else given, batch_size=None)  # type: ignore[arg-type]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def make(model: nn.Module | None = None, **options: Any) -> Trainer:
    """A classifier on the CPU, with what is not said by `options`."""
    model = classifier() if model is None else model
    if "step" not in options:
        options.setdefault("loss", cross_entropy)
    return Trainer(model, **{"train": ready(), "device": "cpu", "progress": False} | options)


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Any],
    *,
    epochs: int,
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    accumulate: int = 1,
    clip: float | None = None,
    schedule: Any = None,
) -> list[float]:
    """The loop as anybody writes it; the mean loss of each epoch's batches."""
    means = []
    for _ in range(epochs):
        values = []
        for index, batch in enumerate(data):
            value = loss(model, batch)
            (value / accumulate).backward()
            values.append(value.item())
            if (index + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        means.append(sum(values) / len(values))
    return means


def assert_same_bits(found: nn.Module, expected: nn.Module) -> None:
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name
