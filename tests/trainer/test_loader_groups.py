"""Training from several loaders: against a plain loop in float64, on ranks, interrupted at each step."""

import os
import re
from collections.abc import Iterator
from itertools import cycle, islice, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import AlternatingLoaders, DataError, DistributedDataLoader, LoaderGroup, PerRankLoader
from tests.trainer import small
from tests.worlds import run_world

FEW, MANY = 4, 8
"""Samples of each loader in one step, over all ranks."""
STEPS = 9
LAYOUTS = [(1, 2), (2, 1)]
"""(ranks, accumulation)"""


def build(kind: str, parts: int) -> Any:
    """Three steps of one loader, and five of the other."""
    loaders = {
        "few": DistributedDataLoader(small.Samples(12), FEW // parts),
        "many": DistributedDataLoader(small.Samples(40), MANY // parts),
    }
    if kind == "turns":
        return AlternatingLoaders(loaders, {"few": 1, "many": 2})
    return loaders if kind == "dict" else LoaderGroup(loaders, end="cycle")


def by_hand(kind: str) -> torch.nn.Module:
    """The loop as one writes it."""

    def batches(length: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        data = small.Samples(length)
        return cycle(zip(data.x.split(size), data.y.split(size), strict=True))

    model = small.filled_network()
    data = {"few": batches(12, FEW), "many": batches(40, MANY)}
    # Many has five steps, so none is left at its sixth turn, the ninth of all; few, at its fourth, which is the tenth
    # (turns are many, few, many). A pass with turns has nine steps, then.
    turns = [["many"], ["few"], ["many"]] if kind == "turns" else [["few", "many"]]
    steps = ([next(data[name]) for name in names] for names in islice(cycle(turns), STEPS))
    small.train_on(small.sgd(model), (sum(mse_loss(model(x), y) for x, y in step) for step in steps))
    return model


class Several(small.Sharded, dt.CheckpointMixin):
    """Adds the losses of what is in the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        parts = batch if isinstance(batch, dict) else dict([batch])
        self.seen.append({name: numbers.tolist() for name, (_, _, numbers) in parts.items()})
        loss = sum((mse_loss(self.model(x), y) for x, y, _ in parts.values()), torch.zeros((), dtype=torch.float64))
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}


def train(loaders: Any, steps: int | None, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights after `steps` in all, and what was counted."""
    checkpoint = dt.CheckpointParameters(save_every_n_epochs=None)
    config = small.make_config(checkpoint=checkpoint, max_steps=steps, **options)
    with Several(config, loaders) as trainer:
        trainer.fit()
        counted = {
            name: getattr(trainer, name)
            for name in ("global_step", "current_epoch", "samples_seen", "steps_per_epoch", "total_steps", "seen")
        }
        return small.weights(trainer.model), counted


def train_built(kind: str, parts: int, accumulation: int) -> Any:
    return train(build(kind, parts), STEPS, gradient_accumulation_steps=accumulation)


@pytest.mark.parametrize(("ranks", "accumulation"), LAYOUTS)
@pytest.mark.parametrize("kind", ["dict", "cycle", "turns"])
def test_two_loaders_train_as_a_plain_loop_would(kind: str, ranks: int, accumulation: int) -> None:
    results = run_world(train_built, ranks, kind, ranks * accumulation, accumulation)
    samples = {"dict": 12 * STEPS, "cycle": 12 * STEPS, "turns": 6 * MANY + 3 * FEW}[kind]
    for found, counted in results:
        small.assert_same_weights(found, by_hand(kind))
        assert counted["samples_seen"] == samples
        assert counted["steps_per_epoch"] == {"dict": 5, "cycle": None, "turns": 10}[kind]
        assert counted["current_epoch"] == {"dict": 1, "cycle": 0, "turns": 0}[kind]


def batches(lengths: list[int], first: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches of the given numbers of samples."""
    data, ends = small.Samples(first + sum(lengths)), [first + sum(lengths[:at]) for at in range(len(lengths) + 1)]
    return [(data.x[a:b], data.y[a:b], torch.arange(a, b)) for a, b in pairwise(ends)]


def train_uneven(experiment: str, steps: int) -> Any:
    """Loaders of their own on each rank, of different lengths and batch sizes."""
    rank = int(os.environ["RANK"])
    loaders = {
        "own": PerRankLoader(batches([2, 1, 3][: 3 - rank], 10 * rank)),
        "dealt": DistributedDataLoader(small.Samples(8), 2),
    }
    return train(LoaderGroup(loaders, end="cycle"), steps, experiment=experiment)


def test_ranks_with_loaders_of_their_own_go_round_by_themselves() -> None:
    straight = run_world(train_uneven, 2, "straight", 7)
    own = [[0, 1], [2], [3, 4, 5]], [[10, 11], [12]]
    for rank, (_, counted) in enumerate(straight):
        assert [batch["own"] for batch in counted["seen"]] == list(islice(cycle(own[rank]), 7))
        # Two rounds of 6 and one batch of 2; three rounds of 3 and one batch of 2; and 2 on each rank of the other.
        assert counted["samples_seen"] == 14 + 11 + 7 * 4
    for until in (2, 5, 7):
        resumed = run_world(train_uneven, 2, "resumed", until)
    for (found, counted), (expected, counted_straight) in zip(resumed, straight, strict=True):
        small.assert_same_weights(found, expected)
        assert counted["samples_seen"] == counted_straight["samples_seen"]


def test_epochs_and_planned_steps_follow_the_group() -> None:
    _, counted = train(build("dict", 1), None, n_epochs=2)
    assert counted["total_steps"] == counted["global_step"] == 10
    assert counted["current_epoch"] == 2
    assert [batch["few"][0] for batch in counted["seen"]] == [0, 4, 8, 0, 4, 8, 0, 4, 8, 0]


def test_a_global_batch_is_of_all_loaders_together() -> None:
    _, counted = train(build("dict", 2), 5, global_batch_size=FEW + MANY)
    assert counted["samples_seen"] == 5 * (FEW + MANY)
    assert len(counted["seen"]) == 10


def test_a_global_batch_of_turns_with_other_sizes_is_refused() -> None:
    with pytest.raises(DataError, match="batch sizes.*'few': 4, 'many': 8.*gradient_accumulation_steps"):
        train(build("turns", 1), 5, global_batch_size=12)


@pytest.mark.parametrize(
    ("kind", "says"), [("empty", "DataError: rank 0: the training loader 'own': .*0 batches"), ("ratio", "ratio")]
)
def test_what_one_rank_cannot_read_or_has_otherwise_is_named_on_all(kind: str, says: str) -> None:
    for error in small.errors_of(train_refused, kind):
        assert re.search(says, error)


def train_refused(kind: str) -> None:
    rank = int(os.environ["RANK"])
    few, many = build("dict", 2).values()
    loaders = {
        "empty": LoaderGroup({"own": PerRankLoader(batches([2] * rank)), "many": many}, end="cycle"),
        "ratio": AlternatingLoaders({"few": few, "many": many}, {"few": 1, "many": 1 + rank}),
    }
    train(loaders[kind], STEPS)
