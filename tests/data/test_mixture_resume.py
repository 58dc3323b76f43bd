"""Which samples make up each optimizer step of a mixture with a curriculum: the same on any ranks, workers and
accumulation, stopped anywhere, resumed twice."""

import hashlib
from typing import Any

import pytest

from tests.api import DataPosition, Mixture, Stage, TrainStream
from tests.data.reading import Layout, close, next_step, open_ranks, seek
from tests.data.samples import DrawingDataset, rows

GLOBAL_BATCH, STEPS = 48, 60
LAYOUTS = [(1, 1, 0), (1, 2, 2), (2, 1, 0), (2, 2, 2), (4, 1, 0), (4, 2, 0)]
"""(ranks, accumulation, workers)"""


class Offset(DrawingDataset):
    """Samples that tell their source by their number, and draw as augmentation does."""

    def __init__(self, first: int, length: int) -> None:
        super().__init__(length)
        self.first = first

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return sample | {"index": sample["index"] + self.first}


def mixture(**changed: Any) -> Mixture:
    options: dict[str, Any] = {
        "weights": {"code": 5, "docs": 3, "talk": 1},
        "stages": [
            Stage(at=1000, weights={"code": 1, "docs": 1, "talk": 1}, ramp=500),
            Stage(at=2000, weights={"code": 1, "talk": 3}),
        ],
        "max_epochs": {"talk": 8},
    }
    sources = {"code": Offset(0, 5000), "docs": Offset(10_000, 300), "talk": Offset(20_000, 70)}
    return Mixture(sources, **options | changed)


def open_streams(layout: Layout, seed: int = 3, **changed: Any) -> list[TrainStream]:
    return open_ranks(lambda: mixture(**changed), layout, GLOBAL_BATCH, seed=seed)


def read(streams: list[TrainStream], steps: int) -> tuple[list[str], DataPosition, list[Any]]:
    """A digest of what is in each step, where they end, and the state as each rank says it."""
    digests, end = [], DataPosition(0, 0, 0)
    for _ in range(steps):
        batches, window = next_step(streams)
        samples = [row for batch in batches for row in rows(batch)]
        assert len(samples) == GLOBAL_BATCH
        digests.append(hashlib.sha256(repr(samples).encode()).hexdigest())
        end = window.end
    return digests, end, [stream.state_at(end) for stream in streams]


@pytest.fixture(scope="module")
def reference() -> list[str]:
    """On one rank, without accumulation, workers or a stop."""
    return read(open_streams((1, 1, 0)), STEPS)[0]


def test_other_seeds_and_weights_are_other_samples(reference: list[str]) -> None:
    assert len(set(reference)) == STEPS
    for changed in ({"seed": 4}, {"weights": {"code": 4, "docs": 3, "talk": 1}}):
        assert not set(read(open_streams((1, 1, 0), **changed), STEPS)[0]) & set(reference)
    late = read(open_streams((1, 1, 0), stages=[Stage(at=2000, weights={"docs": 1})]), STEPS)[0]
    assert late[:20] == reference[:20]
    assert not set(late[22:]) & set(reference)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_workers_and_accumulation_do_not_change_a_step(layout: Layout, reference: list[str]) -> None:
    streams = open_streams(layout)
    assert read(streams, STEPS)[0] == reference
    close(streams)


@pytest.mark.parametrize("stop", [1, 20, 21, 42, 59])
def test_stopped_anywhere_and_resumed_twice_on_other_layouts_it_goes_on(stop: int, reference: list[str]) -> None:
    layouts = [LAYOUTS[(stop + turn) % len(LAYOUTS)] for turn in (0, 1, 3)]
    found: list[str] = []
    position, state = DataPosition(0, 0, 0), None
    for layout, steps in zip(layouts, (stop, 1, STEPS), strict=True):
        streams = open_streams(layout)
        if state is not None:
            seek(streams, position, state)
        digests, position, states = read(streams, min(steps, STEPS - len(found)))
        close(streams)
        assert all(other == states[0] for other in states)
        found, state = found + digests, states[-1]
        if len(found) == STEPS:
            break
    assert found == reference


def test_weights_set_between_two_steps_count_from_the_next_whatever_workers_had_loaded() -> None:
    found = []
    for layout in ((1, 1, 0), (2, 2, 2)):
        streams = open_streams(layout)
        before = read(streams, 10)[0]
        for stream in streams:
            stream.reader.loader.dataset.set_weights({"talk": 1, "docs": 1})
        after, position, states = read(streams, 10)
        close(streams)
        streams = open_streams((1, 1, 0))
        seek(streams, position, states[-1])
        found.append(before + after + read(streams, 20)[0])
    assert found[0] == found[1]
    straight = read(open_streams((1, 1, 0)), 40)[0]
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
