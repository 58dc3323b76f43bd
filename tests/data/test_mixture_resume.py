"""Which samples make up each optimizer step of a mixture with a curriculum: the same on any ranks, workers and
accumulation, stopped anywhere, resumed twice."""

import hashlib
from typing import Any

import pytest

from tests.api import Mixture, Stage
from tests.data.reading import Job, Layout, open_ranks, read_in_parts
from tests.data.samples import DrawingDataset, rows

GLOBAL_BATCH, STEPS = 48, 60
LAYOUTS = [(1, 1, 0), (1, 2, 2), (2, 1, 0), (2, 2, 2), (4, 1, 0), (4, 2, 0)]
"""(ranks, accumulation, workers)"""


def mixture(**changed: Any) -> Mixture:
    options: dict[str, Any] = {
        "weights": {"code": 5, "docs": 3, "talk": 1},
        "stages": [
            Stage(at=1000, weights={"code": 1, "docs": 1, "talk": 1}, ramp=500),
            Stage(at=2000, weights={"code": 1, "talk": 3}),
        ],
        "max_epochs": {"talk": 8},
    }
    sources = {
        "code": DrawingDataset(5000),
        "docs": DrawingDataset(300, first=10_000),
        "talk": DrawingDataset(70, first=20_000),
    }
    return Mixture(sources, **options | changed)


def digest(batches: list[Any]) -> str:
    samples = [row for batch in batches for row in rows(batch)]
    assert len(samples) == GLOBAL_BATCH
    return hashlib.sha256(repr(samples).encode()).hexdigest()


def open_job(layout: Layout, seed: int = 3, **changed: Any) -> Job:
    """Over such a mixture."""
    return Job(open_ranks(lambda: mixture(**changed), layout, GLOBAL_BATCH, seed=seed), digest)


@pytest.fixture(scope="module")
def reference() -> list[str]:
    """On one rank, without accumulation, workers or a stop."""
    return open_job((1, 1, 0)).steps(STEPS)


def test_other_seeds_and_weights_are_other_samples(reference: list[str]) -> None:
    assert len(set(reference)) == STEPS
    for changed in ({"seed": 4}, {"weights": {"code": 4, "docs": 3, "talk": 1}}):
        assert not set(open_job((1, 1, 0), **changed).steps(STEPS)) & set(reference)
    late = open_job((1, 1, 0), stages=[Stage(at=2000, weights={"docs": 1})]).steps(STEPS)
    assert late[:20] == reference[:20]
    assert not set(late[22:]) & set(reference)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_workers_and_accumulation_do_not_change_a_step(layout: Layout, reference: list[str]) -> None:
    job = open_job(layout)
    assert job.steps(STEPS) == reference
    job.close()


@pytest.mark.parametrize("stop", [1, 20, 21, 42, 59])
def test_stopped_anywhere_and_resumed_twice_on_other_layouts_it_goes_on(stop: int, reference: list[str]) -> None:
    layouts = [LAYOUTS[(stop + turn) % len(LAYOUTS)] for turn in (0, 1, 3)]
    parts = list(zip(layouts, (stop, 1, STEPS - stop - 1), strict=True))
    assert read_in_parts(open_job, parts) == reference


def test_weights_set_between_two_steps_count_from_the_next_whatever_workers_had_loaded() -> None:
    found = []
    for layout in ((1, 1, 0), (2, 2, 2)):
        job = open_job(layout)
        steps = job.steps(10)
        for dataset in job.datasets:
            dataset.set_weights({"talk": 1, "docs": 1})
        steps += job.steps(10)
        resumed = open_job((1, 1, 0))
        resumed.go_on(job.saved())
        found.append(steps + resumed.steps(20))
        job.close()
    assert found[0] == found[1]
    straight = open_job((1, 1, 0)).steps(40)
    assert found[0][:10] == straight[:10]
    assert not set(found[0][10:]) & set(straight)


def test_going_on_with_another_mixture_is_said_once_with_what_is_other(caplog: pytest.LogCaptureFixture) -> None:
    sources = {"a": ["a"] * 500, "b": ["b"] * 300}
    before = Mixture(sources, {"a": 1, "b": 1})
    before.begin(0, None)
    same, other = Mixture(sources, on_change="continue"), Mixture(sources, {"a": 3, "b": 1}, on_change="continue")
    for mixture in (same, other, other):
        mixture.begin(0, before.state_at(700))
    (record,) = caplog.records
    assert "another mixture, from position 700 on: weights was {'a': 1, 'b': 1}, and is {'a': 3, 'b': 1}" in (
        record.getMessage()
    )
