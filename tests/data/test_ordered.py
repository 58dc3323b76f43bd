"""A dataset that decides its order itself, by hand: its state and its marks go with the position."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests import api
from tests.data.reading import Layout, close, next_step, open_ranks, open_stream, seek

GLOBAL_BATCH = 8
LAYOUTS = [(1, 1, 0), (1, 2, 2), (2, 1, 0), (2, 2, 2), (4, 2, 0), (4, 1, 0)]
"""(ranks, accumulation, workers)"""


class Walk(api.OrderedDataset):
    """Sample p is (pass, p, how often anybody asked to `turn` before p, a sum that is walked to from an anchor)."""

    def __init__(self, length: int = api.ENDLESS) -> None:
        self.length = length
        self.epoch, self.turns, self.asked = 0, [0], False
        self.anchor = [0, 0]
        self.walked = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> torch.Tensor:
        at, total = self.anchor
        assert at <= position, "an anchor that is newer than what is asked for"
        while at < position:
            at, total = at + 1, total + at
            self.walked += 1
        self.anchor = [at, total]
        turns = sum(turn <= position for turn in self.turns)
        return torch.tensor([self.epoch, position, turns, total, self.seed])

    def begin(self, seed: int, state: dict[str, Any] | None) -> None:
        self.seed, self.anchor = seed, [0, 0]
        if state is not None:
            self.turns, self.anchor = list(state["turns"]), list(state["anchor"])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_at(self, position: int, mark: Any = None) -> dict[str, Any]:
        return {"turns": list(self.turns), "anchor": list(self.anchor if mark is None else mark)}

    def mark(self) -> Any:
        return list(self.anchor)

    def turn(self) -> None:
        self.asked = True

    def changes_at(self, position: int, mark: Any = None) -> bool:
        asked, self.asked = self.asked, False
        if asked:
            self.turns.append(position)
        return asked


def open_streams(*layout: int, length: int = api.ENDLESS) -> list[api.TrainStream]:
    options = {"persistent_workers": True} if layout[2] else {}
    return open_ranks(lambda: Walk(length), layout, GLOBAL_BATCH, **options)


def read(streams: Sequence[api.TrainStream], steps: int) -> tuple[list[Any], api.DataPosition, list[Any], bool]:
    """The samples of each step in global order, where they end, and the state there as each rank says it."""
    found: list[Any] = []
    position, is_last = api.DataPosition(0, 0, 0), False
    while len(found) < steps:
        if (step := next_step(streams)) is not None:
            batches, window = step
            found.append([row for batch in batches for row in batch.tolist()])
            position, is_last = window.end, bool(window.is_last)
    return found, position, [stream.state_at(position) for stream in streams], is_last


def turn(streams: Sequence[api.TrainStream]) -> None:
    for stream in streams:
        stream.reader.loader.dataset.turn()  # type: ignore[union-attr]


def straight(length: int, steps: int, turn_after: int | None = None) -> list[Any]:
    streams = open_streams(1, 1, 0, length=length)
    before = read(streams, turn_after)[0] if turn_after else []
    if turn_after:
        turn(streams)
    return before + read(streams, steps - len(before))[0]


@pytest.mark.parametrize("layout", [(1, 1, 0), (2, 2, 2)])
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_change_counts_from_the_next_window_on_and_survives_a_pass_and_a_resume(layout: Layout, stop: int) -> None:
    expected = straight(24, 8, turn_after=2)
    assert [sorted({row[2] for row in step}) for step in expected[:4]] == [[1], [1], [2], [1]]
    assert [step[0][:2] for step in expected[2:4]] == [[0, 16], [1, 0]]
    streams = open_streams(*layout, length=24)
    found = read(streams, 2)[0]
    turn(streams)
    more, position, states, is_last = (
        read(streams, stop - 2) if stop > 2 else ([], api.DataPosition(0, 16, 0), [], False)
    )
    found += more
    if stop > 2:
        close(streams)
        streams = open_streams(1, 4, 0, length=24)
        seek(streams, position, states[0], is_pass_over=is_last)
    found += read(streams, 8 - stop)[0]
    close(streams)
    assert found == expected


def test_the_state_of_a_position_knows_nothing_of_what_was_loaded_after_it() -> None:
    (stream,) = open_streams(1, 2, 2)
    _, position, (state,), _ = read([stream], 2)
    assert state == {"turns": [0], "anchor": [15, 105]}
    next_step([stream])
    assert stream.state_at(position) == state
    close([stream])


def test_another_kind_of_dataset_than_the_checkpoints_is_refused() -> None:
    (stream,) = open_streams(1, 1, 0)
    with pytest.raises(api.DataError, match=r"the dataset \(Walk\) are of two kinds"):
        stream.seek(api.DataPosition(0, 8, 1), None)
    plain = open_stream(api.DistributedDataLoader(range(16), 8))
    with pytest.raises(api.DataError, match=r"the dataset \(range\) are of two kinds"):
        plain.seek(api.DataPosition(0, 8, 1), None, state={"turns": []})


def test_a_dataset_with_an_order_is_not_shuffled_and_an_endless_one_not_validated() -> None:
    with pytest.raises(api.DataError, match="shuffle=False"):
        api.DistributedDataLoader(Walk(), 2, shuffle=True)
    with pytest.raises(api.DataError, match="never ends"):
        api.validation_batches(api.DistributedDataLoader(Walk(), 2), dp_rank=0, dp_size=1, seed=0)
    batches = api.validation_batches(api.DistributedDataLoader(Walk(5), 2), dp_rank=0, dp_size=1, seed=0)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [len(batch) for batch in batches] == [2, 2, 1]
