"""Samples are counted as they were dealt, whatever the batches look like: in means, in counters, in gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import Dataset

import dream_trainer as dt
from tests.api import DistributedDataLoader, IterableShards, LoaderGroup, PerRankLoader, StreamLoader
from tests.data.samples import KeepsNext
from tests.trainer.small import Alone, Spread, fill, make_config, sharded
from tests.worlds import run_world

TRAIN, VAL = 8, 7
SHAPES = ((3, 4), (5, 2), (2, 6))  # of images, by turns


class Images(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.first + index)
        x = torch.randn(3, *SHAPES[index % 3], generator=generator, dtype=torch.float64) + index
        return x, torch.tensor(0.1 * (self.first + index), dtype=torch.float64)


def as_lists(samples: list[tuple[Tensor, Tensor]]) -> Any:
    """As detection models take them."""
    return [x for x, _ in samples], [y for _, y in samples]


def time_first(samples: list[tuple[Tensor, Tensor]]) -> Any:
    """As recurrent networks take them: [time, batch, channels]."""
    return torch.stack([x.mean((1, 2)).expand(2, 3) for x, _ in samples], 1), torch.stack([y for _, y in samples])


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    if isinstance(images, list):
        features, targets = torch.stack([image.mean((1, 2)) for image in images]), torch.stack(targets)
    else:
        features = images.mean(0)
    return (model(features).squeeze(1) - targets).square().mean()


def linear() -> nn.Module:
    model = nn.Linear(3, 1).double()
    fill(model)
    return model


def sample_losses(first: int, length: int) -> list[float]:
    with torch.no_grad():
        return [loss_of(linear(), as_lists([sample])).item() for sample in Images(first, length)]  # type: ignore[misc]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


class Counting(dt.LoggerMixin):
    """Learns nothing, so that every mean is one of the first weights."""

    make_model = staticmethod(linear)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = loss_of(self.model, batch)
        self.backward(loss)
        self.log("by_log", loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.log("by_log", loss_of(self.model, batch))
        return {"loss": loss_of(self.model, batch)}


def still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


class OneProcess(Counting, Alone):
    pass


class Replicas(Counting, Spread):
    pass


def told(trainer: Any) -> dict[str, Any]:
    """What an epoch told of its samples, whose weights never moved."""
    with trainer:
        trainer.fit()
        found = {name: value for line in trainer.history for name, value in line.items() if "lo" in name}
        return {
            **found,
            "seen": trainer.samples_seen,
            "warned": sorted(trainer._runtime.said_once & {"samples of a batch"}),
        }


def loaders(collate: Any) -> tuple[Any, Any]:
    return (
        DistributedDataLoader(Images(0, TRAIN), 3, drop_last=False, collate_fn=collate),
        DistributedDataLoader(Images(50, VAL), 3, collate_fn=collate),
    )


def of_class(cls: type[Any], collate: Any) -> dict[str, Any]:
    # One line at the epoch's end has the means of all its batches.
    return told(cls(make_config(n_epochs=1, log_every=100), *loaders(collate), make_optimizer=still))


def on_two_ranks() -> list[dict[str, Any]]:
    return [of_class(cls, collate) for cls, collate in ((Replicas, time_first), (sharded(Replicas), as_lists))]


def assert_counted(found: dict[str, Any]) -> None:
    assert found["seen"] == TRAIN
    assert found["warned"] == []
    for name in ("train/loss", "by_log"):
        assert found[name] == pytest.approx(mean(sample_losses(0, TRAIN)), rel=1e-12)
    for name in ("val/loss", "val/by_log"):
        assert found[name] == pytest.approx(mean(sample_losses(50, VAL)), rel=1e-12)


@pytest.mark.pitfall(100)
def test_means_and_counters_are_over_the_samples_that_were_dealt() -> None:
    assert_counted(of_class(OneProcess, as_lists))
    for of_rank in run_world(on_two_ranks, 2):
        for found in of_rank:
            assert_counted(found)


class Shard(KeepsNext):
    """Four images that are read in order, and can be gone on with."""

    def __init__(self, number: int) -> None:
        self.images = Images(4 * number, 4)

    def __iter__(self) -> Iterator[Any]:
        while self.next < 4:
            self.next += 1
            yield self.images[self.next - 1]


GIVEN: dict[str, tuple[Any, dict[str, Any], int]] = {
    "a stream": (lambda: StreamLoader(IterableShards(Shard, range(2)), 2, collate_fn=as_lists), {"max_steps": 3}, 6),
    "a group": (
        lambda: LoaderGroup({"a": loaders(as_lists)[0], "b": loaders(time_first)[0]}),
        {"n_epochs": 1},
        12,  # whole windows only
    ),
    "the first batches": (lambda: loaders(as_lists)[0], {"max_steps": 4, "overfit_batches": 3}, 3 + 3 + 2 + 3),
}


@pytest.mark.pitfall(100)
@pytest.mark.parametrize("given", GIVEN)
def test_streams_groups_and_repeated_batches_know_their_samples(given: str) -> None:
    sizes: list[int] = []

    class Notes(OneProcess):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            sizes.append(self._runtime.window.batch_samples)
            for part in batch.values() if isinstance(batch, dict) else [batch]:
                super().training_step(part, batch_idx) if part is batch else self.backward(loss_of(self.model, part))
            if isinstance(batch, dict):
                self.step(self.model, self.optimizer)
            return {}

    make, limits, samples = GIVEN[given]
    found = told(Notes(make_config(**limits), make(), make_optimizer=still))
    assert found["seen"] == sum(sizes) == samples
    assert found["warned"] == []


@pytest.mark.pitfall(100)
def test_a_doubtful_guess_of_a_batch_warns_once_with_what_to_override(caplog: pytest.LogCaptureFixture) -> None:
    samples = list(Images(0, TRAIN))  # type: ignore[call-overload]
    batches = [as_lists(samples[first : first + 2]) for first in range(0, TRAIN, 2)]
    config = make_config(n_epochs=1)
    assert told(OneProcess(config, PerRankLoader(batches), batches, make_optimizer=still))["warned"]
    assert [record.message for record in caplog.records if "batch_size(self, batch)" in record.message] != []

    class Own(OneProcess):
        def batch_size(self, batch: Any) -> int:
            return len(batch[0])

    found = told(Own(config, batches, batches, make_optimizer=still))
    assert (found["seen"], found["warned"]) == (TRAIN, [])
