"""A dataset that decides its order itself, by hand: its state and its marks go with the position."""

from typing import Any

import pytest
import torch

from tests import api
from tests.data.reading import Job, Layout, open_ranks, open_stream, open_validation

GLOBAL_BATCH = 8


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


def open_job(layout: Layout, length: int = api.ENDLESS) -> Job:
    """Over walks; a step is its samples in global order."""
    options = {"persistent_workers": True} if layout[2] else {}
    streams = open_ranks(lambda: Walk(length), layout, GLOBAL_BATCH, **options)
    return Job(streams, lambda batches: [row for batch in batches for row in batch.tolist()])


def turn(job: Job) -> None:
    for dataset in job.datasets:
        dataset.turn()


@pytest.mark.parametrize("layout", [(1, 1, 0), (2, 2, 2)])
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_change_counts_from_the_next_window_on_and_survives_a_pass_and_a_resume(layout: Layout, stop: int) -> None:
    straight = open_job((1, 1, 0), 24)
    expected = straight.steps(2)
    turn(straight)
    expected += straight.steps(6)
    assert [sorted({row[2] for row in step}) for step in expected[:4]] == [[1], [1], [2], [1]]
    assert [step[0][:2] for step in expected[2:4]] == [[0, 16], [1, 0]]
    job = open_job(layout, 24)
    found = job.steps(2)
    turn(job)
    found += job.steps(stop - 2)
    if stop > 2:
        saved = job.saved()
        job.close()
        job = open_job((1, 4, 0), 24)
        job.go_on(saved)
    found += job.steps(8 - stop)
    job.close()
    assert found == expected


def test_the_state_of_a_position_knows_nothing_of_what_was_loaded_after_it() -> None:
    job = open_job((1, 2, 2))
    (stream,) = job.streams
    job.steps(2)
    position, state = job.position, stream.state_at(job.position)
    assert state == {"turns": [0], "anchor": [15, 105]}
    job.steps(1)
    assert stream.state_at(position) == state
    job.close()


def test_another_kind_of_dataset_than_the_checkpoints_is_refused() -> None:
    (stream,) = open_job((1, 1, 0)).streams
    with pytest.raises(api.DataError, match=r"the dataset \(Walk\) are of two kinds"):
        stream.seek(api.DataPosition(0, 8, 1), None, is_pass_over=False, state=None)
    plain = open_stream(api.DistributedDataLoader(range(16), 8))
    with pytest.raises(api.DataError, match=r"the dataset \(range\) are of two kinds"):
        plain.seek(api.DataPosition(0, 8, 1), None, state={"turns": []}, is_pass_over=False)


def test_a_dataset_with_an_order_is_not_shuffled_and_an_endless_one_not_validated() -> None:
    with pytest.raises(api.DataError, match="shuffle=False"):
        api.DistributedDataLoader(Walk(), 2, shuffle=True)
    with pytest.raises(api.DataError, match="never ends"):
        open_validation(api.DistributedDataLoader(Walk(), 2))
    batches = open_validation(api.DistributedDataLoader(Walk(5), 2))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [len(batch) for batch in batches] == [2, 2, 1]
