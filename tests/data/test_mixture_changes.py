"""Weights that are set while a mixture is read: how long they count, and what is saved of them."""

import json
from typing import Any

import pytest

from tests.api import ConfigError, DistributedDataLoader, Mixture, Stage, TrainStream, train_stream


def two(**options: Any) -> Mixture:
    return Mixture({"a": range(300), "b": range(1000, 1300)}, **options)


def opened(mixture: Any, batch_size: int = 100) -> TrainStream:
    loader = DistributedDataLoader(mixture, batch_size, collate_fn=list)
    return train_stream(loader, accumulation=1, dp_rank=0, dp_size=1, seed=0)


def step(stream: TrainStream) -> tuple[list[Any], Any]:
    """The samples of the next step and the position after it; a pass ends with its last step, as in a trainer."""
    window = stream.next_window()
    samples = [sample for batch in window.batches for sample in batch]
    if window.is_last:
        stream.end_pass()
    return samples, window.end


def share_of_b(samples: list[int]) -> float:
    return sum(sample >= 1000 for sample in samples) / len(samples)


def test_weights_set_during_a_ramp_count_until_the_next_stage() -> None:
    stages = [Stage(at=500, weights={"a": 3, "b": 1}, ramp=3000), Stage(at=4000, weights={"a": 1})]
    mixture = two(stages=stages)
    mixture.begin(0, None)
    mixture.set_weights({"b": 1})
    assert mixture.changes_at(1000)
    assert share_of_b([mixture[position] for position in range(1000, 4000)]) == 1
    assert share_of_b([mixture[position] for position in range(4000, 5000)]) == 0


def test_a_stage_that_begins_within_the_ramp_before_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="at 500 has a ramp of 301, and the next one begins at 800"):
        two(stages=[Stage(at=500, weights={"a": 1}, ramp=301), Stage(at=800, weights={"b": 1})])
    two(stages=[Stage(at=500, weights={"a": 1}, ramp=300), Stage(at=800, weights={"b": 1})])


def test_weights_asked_for_when_a_pass_has_ended_are_saved() -> None:
    for asked_after in range(1, 9):
        mixture = two(num_samples=250)  # 2 steps of 100 in a pass, and 50 that are left out
        stream = opened(mixture)
        for _ in range(asked_after):
            _, end = step(stream)
        mixture.set_weights({"a": 1, "b": 9})
        state = json.loads(json.dumps(stream.state_at(end)))
        resumed = opened(two(num_samples=250))
        resumed.seek(end, None, is_pass_over=asked_after % 2 == 0, state=state)
        assert [step(resumed)[0] for _ in range(5)] == [step(stream)[0] for _ in range(5)], asked_after
