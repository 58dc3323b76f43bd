"""Streams of lanes beside a hand-written reading in one process."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.api import Batch, Filter, IterableShards, Map, Shuffle, Unbatch, divisors
from tests.data import lane_truth
from tests.data.samples import global_states

COUNTS = lane_truth.lengths(12)
SMALL = lane_truth.lengths(8, most=13)
TO_NUMBER = Map(lane_truth.identity)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def draw(sample: Any) -> tuple[Any, float, float, float]:
    """A random augmentation."""
    return sample, random.random(), float(np.random.rand()), torch.rand(()).item()


def is_odd(sample: Any) -> bool:
    return lane_truth.identity(sample) % 2 == 1


def tokenise(samples: list[Any]) -> list[str]:
    return [f"token {lane_truth.identity(sample)}" for sample in samples]


EVERYTHING = [Shuffle(5), Filter(is_odd), Map(draw)]


@pytest.mark.parametrize("kind", lane_truth.KINDS)
@pytest.mark.parametrize(("lanes", "turns"), [(8, 1), (4, 3)])
def test_steps_are_of_a_hand_written_reading_in_any_layout(kind: str, lanes: int, turns: int, tmp_path: Path) -> None:
    source = lane_truth.make_source(kind, tmp_path, COUNTS)
    expected = lane_truth.expected_steps(COUNTS, 30, lanes=lanes, turns=turns)
    for layout in lane_truth.LAYOUTS if kind == "live" else lane_truth.LAYOUTS[:2]:
        found = lane_truth.read_in_parts(
            lambda: source, [(layout, 30)], lanes=lanes, turns=turns, transforms=[TO_NUMBER]
        )
        assert [sorted(step) for step in found] == expected


@pytest.mark.parametrize("transforms", [[TO_NUMBER], EVERYTHING], ids=["in order", "everything"])
@pytest.mark.parametrize("stop", range(0, 40, 3))
def test_a_stream_goes_on_at_any_step_in_any_layout_twice_in_a_row(transforms: list, stop: int, tmp_path: Path) -> None:
    def source() -> Any:
        return lane_truth.make_source("live", tmp_path, SMALL)

    options = {"lanes": 4, "turns": 2, "transforms": transforms, "shuffle_shards": True}
    expected = lane_truth.read_in_parts(source, [((1, 1, 0), stop + 5)], **options)
    first, second, third = (
        (*lane_truth.LAYOUTS[(stop + place) % len(lane_truth.LAYOUTS)][:2], 0) for place in range(3)
    )
    found = lane_truth.read_in_parts(source, [(first, stop), (second, 2), (third, 3)], **options)
    assert [lane_truth.digest(step) for step in found] == [lane_truth.digest(step) for step in expected]


@pytest.mark.parametrize("number", range(4))
def test_plans_of_any_numbers_go_on_in_any_layout(number: int) -> None:
    chosen = random.Random(number)
    batch, counts = chosen.choice([1, 2, 4, 6, 8, 12]), [chosen.randint(1, 30) for _ in range(chosen.randint(1, 14))]
    lanes = chosen.choice([lane for lane in divisors(batch) if lane <= len(counts)])
    turns = chosen.randint(1, len(counts) // lanes)
    layouts = [(ranks, part, 0) for ranks in divisors(lanes) for part in divisors(batch // ranks)]
    parts = [(chosen.choice(layouts), chosen.randint(1, 25)) for _ in range(4)]
    whole = [((1, 1, 0), sum(steps for _, steps in parts))]
    source = IterableShards(lane_truth.LiveLines, list(enumerate(counts)))
    window, shuffle_shards = chosen.randint(1, 40), chosen.random() < 0.5
    for transforms in ([], [Batch(3), Unbatch(), Shuffle(window)]):
        expected, found = (
            lane_truth.read_in_parts(
                lambda: source,
                plan,
                global_batch=batch,
                lanes=lanes,
                turns=turns,
                transforms=transforms,
                shuffle_shards=shuffle_shards,
            )
            for plan in (whole, parts)
        )
        assert [lane_truth.digest(step) for step in found] == [lane_truth.digest(step) for step in expected]


def test_a_state_handed_out_by_reference_is_copied(tmp_path: Path) -> None:
    source, options = lane_truth.make_source("live", tmp_path, SMALL), {"lanes": 4, "transforms": [Shuffle(5)]}
    job = lane_truth.Job(lane_truth.open_lanes(source, (1, 1, 0), **options))
    job.steps(3)
    position, state, _ = job.ends[0]
    expected = job.steps(3)
    job.streams[0].seek(position, state, is_pass_over=False, state=None)
    assert job.steps(3) == expected


def test_each_sample_of_an_epoch_comes_once_in_each_lane(tmp_path: Path) -> None:
    counts = [11] * 8
    source = lane_truth.make_source("live", tmp_path, counts)
    found = lane_truth.read_in_parts(
        lambda: source, [((2, 2, 0), 5), ((1, 1, 0), 17)], lanes=8, transforms=[Shuffle(4)], shuffle_shards=True
    )
    per_epoch = [Counter(sample for step in found[11 * epoch :][:11] for sample in step) for epoch in (0, 1)]
    every = {1000 * shard + index: 1 for shard in range(8) for index in range(11)}
    assert per_epoch == [every, every]
    orders = [[sample for step in found[11 * epoch :][:11] for sample in step] for epoch in (0, 1)]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("layout", [(1, 1, 0), (2, 2, 0), (4, 1, 2)])
def test_a_pass_without_repeat_ends_with_the_last_step_that_each_lane_can_fill(
    layout: tuple[int, int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = [9, 13, 9, 9]  # 2 samples of each lane in a step: 4 steps, and 1 or 5 samples are left
    streams = lane_truth.open_lanes(lane_truth.make_source("live", tmp_path, counts), layout, lanes=4, repeat=False)
    epochs: list[list[list[Any]]] = [[], []]
    for epoch in epochs:
        while all(windows := [stream.next_window() for stream in streams]):
            epoch.append(sorted(sample for window in windows for batch in window.batches for sample in batch))
        for stream in streams:
            stream.end_pass()
    for stream in streams:
        stream.close()
    expected = [sorted(1000 * lane + 2 * step + i for lane in range(4) for i in (0, 1)) for step in range(4)]
    assert epochs == [expected, expected]
    assert "The pass over the training data ends after 4 steps: lane 0 has 1 of the 2 samples" in caplog.text


def test_transforms_are_applied_in_their_order(tmp_path: Path) -> None:
    def change(samples: Iterator[int]) -> Iterator[str]:
        while batch := list(islice(samples, 4)):
            yield from tokenise([sample for sample in batch if sample % 2])

    source = lane_truth.make_source("live", tmp_path, [64] * 8)
    found = lane_truth.read_in_parts(
        lambda: source, [((1, 1, 0), 20)], lanes=8, transforms=[Filter(is_odd), Batch(4), Map(tokenise), Unbatch()]
    )
    expected = lane_truth.expected_steps([64] * 8, 20, lanes=8, change=change)
    assert [sorted(step) for step in found] == expected


def test_a_shuffle_moves_samples_within_its_window_only(tmp_path: Path) -> None:
    source = lane_truth.make_source("live", tmp_path, [40] * 4)
    found = lane_truth.read_in_parts(
        lambda: source, [((1, 1, 0), 80)], lanes=4, transforms=[Shuffle(8)], global_batch=4
    )
    lane = [sample for step in found for sample in step if sample < 1000]
    assert lane[:40] != lane[40:] != list(range(40))
    for start in range(0, 80, 8):
        assert sorted(lane[start : start + 8]) == [place % 40 for place in range(start, start + 8)]


def test_draws_depend_on_the_sample_and_the_epoch_and_leave_training_alone(tmp_path: Path) -> None:
    before = global_states()
    source = lane_truth.make_source("live", tmp_path, [6] * 8)
    found = lane_truth.read_in_parts(lambda: source, [((1, 1, 0), 12)], transforms=[Map(draw), Map(draw)])
    assert global_states() == before
    draws = [value for step in found for (first, *second) in step for value in (*first[1:], *second)]
    assert len(set(draws)) == len(draws) == 12 * 8 * 6
