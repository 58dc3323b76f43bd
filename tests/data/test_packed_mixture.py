"""Rows packed from a mixture of three sources with a curriculum: the same tokens in each step, wherever it went on."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch.utils.data import Dataset

from tests.api import DataError, Mixture, PackedRows, Stage
from tests.data.documents import APART, document, web_like_lengths
from tests.data.reading import Job, Layout, open_ranks, read_in_parts

GLOBAL_BATCH, STEPS, ROW_LENGTH, BLOCK_SIZE = 8, 16, 256, 60
LAYOUTS = [(1, 1, 0), (2, 1, 2), (4, 2, 0), (1, 4, 2), (2, 2, 0), (4, 1, 2)]
"""(ranks, accumulation, workers)"""
NAMES = ("code", "docs", "web")


class Source(Dataset[NDArray[np.int64]]):
    """Documents whose every token says whose it is."""

    def __init__(self, number: int) -> None:
        self.first = number * 1000
        self.lengths = web_like_lengths(300, seed=number)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return document(self.first + index, int(self.lengths[index]))


def mixture(**options: Any) -> Mixture:
    sources = {name: Source(number) for number, name in enumerate(NAMES)}
    stages = [Stage(at=90, weights={"code": 1, "docs": 6}, ramp=60), Stage(at=300, weights={"web": 1})]
    return Mixture(sources, **{"weights": {"code": 3, "web": 1}, "stages": stages, **options})


def packed(**options: Any) -> PackedRows:
    return PackedRows(mixture(**options), ROW_LENGTH, block_size=BLOCK_SIZE)


def digest(batches: list[Any]) -> tuple[str, dict[str, int]]:
    """Of a step's real tokens in global order, and how many are of which source."""
    tokens = np.concatenate([batch["tokens"][batch["documents"] >= 0].numpy() for batch in batches])
    numbers = np.bincount(tokens // APART // 1000, minlength=len(NAMES)).tolist()
    return hashlib.sha256(tokens.tobytes()).hexdigest(), dict(zip(NAMES, numbers, strict=True))


def open_job(layout: Layout, **options: Any) -> Job:
    return Job(open_ranks(lambda: packed(**options), layout, GLOBAL_BATCH), digest)


def set_weights(job: Job, **weights: float) -> None:
    for rows in job.datasets:
        rows.documents.set_weights(weights)


def nothing(job: Job) -> None: ...


def other_weights(job: Job) -> None:
    set_weights(job, docs=1, web=1)


@pytest.mark.parametrize(
    ("stops", "number", "between"), [((1, 2), 0, nothing), ((5, 6), 3, other_weights), ((3, 11), 0, other_weights)]
)
def test_a_curriculum_goes_on_the_same(between: Callable[[Job], None], number: int, stops: tuple[int, int]) -> None:
    """Weights that are set between two steps count from the next block on, and are in the state also if it is saved
    before anything was read by them."""
    straight = open_job(LAYOUTS[0])
    expected = straight.steps(stops[0])
    between(straight)
    expected += straight.steps(STEPS - stops[0])
    assert len({digest for digest, _ in expected}) == STEPS
    assert expected[0][1]["docs"] == 0
    assert expected[-1][1]["code"] == 0
    layouts = [LAYOUTS[(number + part) % len(LAYOUTS)] for part in range(3)]
    counts = (stops[0], stops[1] - stops[0], STEPS - stops[1])
    assert read_in_parts(open_job, list(zip(layouts, counts, strict=True)), between) == expected


@pytest.mark.parametrize("layout", [(1, 1, 0), (2, 2, 2)])
def test_weights_that_are_set_lose_no_token_of_the_block_that_was_begun(layout: Layout) -> None:
    job, unchanged = open_job(layout, stages=()), open_job(layout, stages=())
    found, expected = job.steps(3), unchanged.steps(12)
    set_weights(job, docs=1)
    found += job.steps(9)
    for each in (job, unchanged):
        each.close()
    same = [number for number in range(12) if found[number] == expected[number]]
    assert same[:3] == [0, 1, 2]
    assert same == list(range(len(same)))
    rows = packed(stages=())
    rows.begin(3, None)
    _ = rows[3 * GLOBAL_BATCH]
    number, first_row, num_rows = rows.mark()
    assert number > 0
    assert len(same) == (first_row + num_rows) // GLOBAL_BATCH > 3
    assert found[-1][1]["docs"] == sum(found[-1][1].values()) > 0


def test_another_mixture_is_refused_or_goes_on_with_the_next_block() -> None:
    before = open_job((2, 1, 0))
    found = before.steps(6)
    other = {"weights": {"docs": 1}, "stages": ()}
    refused = open_job((1, 1, 0), **other)
    refused.go_on(before.saved())
    with pytest.raises(DataError, match="another mixture"):
        refused.steps(1)
    job = open_job((1, 1, 0), **other, on_change="continue")
    job.go_on(before.saved())
    after = job.steps(4)
    assert all(numbers["docs"] == sum(numbers.values()) for _, numbers in after)
    assert found[5][1]["code"] > 0


def test_a_source_without_lengths_is_named_before_anything_is_read() -> None:
    with pytest.raises(DataError, match="source 'plain'.*lengths"):
        PackedRows(Mixture({"plain": [document(0, 3)]}), 8)
