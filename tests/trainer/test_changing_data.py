"""Data that change between epochs, or between two processes of a run: followed exactly, or refused by name."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dream_trainer as dt
from tests.api import DataError, DistributedDataLoader
from tests.trainer.small import Config, Samples, Spread, fit, make_config, outcome, weights
from tests.worlds import run_world

STEPS = [4, 5, 6]


class Growing(Dataset[Any]):
    """Eight samples in the first pass, two more in each later one."""

    def __init__(self) -> None:
        self.data, self.length = Samples(64), 8

    def set_epoch(self, epoch: int) -> None:
        self.length = 8 + 2 * epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        assert index < self.length
        return self.data[index]


class Records(Spread, dt.CheckpointMixin):
    """Stops where it is told."""

    def __init__(self, config: Config, train: Any, stop_after: int | None = None) -> None:
        super().__init__(config, train)
        self.stop_after = stop_after

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.global_step + 1 == self.stop_after:
            self.request_stop()
        return super().training_step(batch, batch_idx)


class Grows(Records):
    """The user's own way: the dataset is changed in pre_epoch."""

    def pre_epoch(self) -> None:
        self.train_dataloader.dataset.length = 8 + 2 * self.current_epoch


class GrowsUnsaid(Records):
    def post_epoch(self) -> None:
        self.train_dataloader.dataset.length += 2


class Replaces(Records):
    """Another loader in each epoch."""

    def pre_epoch(self) -> None:
        if self.current_epoch > 0:
            data = torch.utils.data.Subset(Samples(64), range(20, 28 + 2 * self.current_epoch))
            self.train_dataloader = DataLoader(data, 2, shuffle=True)


class ReplacesOnce(Records):
    def post_epoch(self) -> None:
        if self.current_epoch == 1:
            self.train_dataloader = DistributedDataLoader(Samples(8), 2)


def config(experiment: str = "run", **training: Any) -> Config:
    checkpoint = dt.CheckpointParameters(save_every_n_epochs=None, async_save=False)
    return make_config(experiment=experiment, checkpoint=checkpoint, **{"n_epochs": 3} | training)


def train(kind: type[Records], data: Any, stop_after: int | None = None, **training: Any) -> Records:
    return fit(kind(config(**training), data, stop_after))


def plain(data: Any) -> DataLoader[Any]:
    return DataLoader(data, 2, shuffle=True)


class Unaware(Growing):
    """Without `set_epoch`."""

    set_epoch = None  # type: ignore[assignment]


@pytest.mark.pitfall(77)
@pytest.mark.parametrize(("kind", "data"), [(Records, Growing), (Grows, Unaware), (Replaces, Unaware)])
@pytest.mark.parametrize("stop_after", [2, 4, 9])
def test_changed_data_are_followed_and_resumed_exactly(
    kind: type[Records], data: type[Growing], stop_after: int
) -> None:
    whole = train(kind, plain(data()), experiment="whole")
    assert len(whole.seen) == sum(STEPS)
    ends = [sum(STEPS[:epoch]) for epoch in range(4)]
    first = 20 if kind is Replaces else 0
    for epoch in range(3):
        numbers = sorted(n for batch in whole.seen[ends[epoch] : ends[epoch + 1]] for n in batch)
        start = first if epoch else 0
        assert numbers == list(range(start, start + 8 + 2 * epoch))
    before = train(kind, plain(data()), stop_after)
    after = train(kind, plain(data()))
    assert before.seen + after.seen == whole.seen
    assert all(torch.equal(value, weights(whole.model)[name]) for name, value in weights(after.model).items())


@pytest.mark.pitfall(77)
def test_persistent_workers_see_the_dataset_of_their_pass() -> None:
    data = DataLoader(Growing(), 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    assert len(train(Records, data).seen) == sum(STEPS)


class OtherBatches(Records):
    def pre_epoch(self) -> None:
        if self.current_epoch == 1:
            self.train_dataloader = DataLoader(Samples(16), 4)


@pytest.mark.pitfall(77)
@pytest.mark.parametrize(
    ("kind", "data", "until", "told"),
    [
        (GrowsUnsaid, Unaware, 6, "middle of a pass over 10 training samples, and the dataset now has 8"),
        (ReplacesOnce, lambda: Samples(16), 10, "Assign it in pre_epoch"),
        (OtherBatches, lambda: Samples(16), 0, "batch size 4, and the run has 2"),
    ],
)
def test_data_with_which_a_run_cannot_go_on_is_refused(kind: type[Records], data: Any, until: int, told: str) -> None:
    if until:
        train(kind, plain(data()), until)
    with pytest.raises(DataError, match=told):
        train(kind, plain(data()))


@pytest.mark.pitfall(77)
def test_another_length_at_the_end_of_an_epoch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    train(Records, plain(Samples(8)), n_epochs=1)
    assert len(train(Records, plain(Samples(12)), n_epochs=2).seen) == 6
    assert "the training dataset has 12 samples, and had 8" in caplog.text


class GrowsOnOneRank(Records):
    def pre_epoch(self) -> None:
        if self.world.rank == 1 and self.current_epoch == 1:
            self.train_dataloader.dataset.length = 12


class ReplacesOnOneRank(Records):
    def pre_epoch(self) -> None:
        if self.world.rank == 1 and self.current_epoch == 1:
            self.train_dataloader = plain(Samples(8))


def on_ranks() -> dict[str, Any]:
    data = {Records: Growing, Replaces: Unaware, GrowsOnOneRank: Unaware, ReplacesOnOneRank: Unaware}
    found: dict[str, Any] = {}
    trainers = []
    for kind, make in data.items():
        trainers.append(kind(config(kind.__name__), plain(make())))
        told = outcome(trainers[-1])
        found[kind.__name__] = trainers[-1].seen if told == "trained" else told
    for trainer in trainers:
        trainer.close()
    return found


@pytest.mark.pitfall(77)
def test_ranks_follow_changed_data_together() -> None:
    first, second = run_world(on_ranks, 2)
    for kind, start in (("Records", 0), ("Replaces", 20)):
        assert len(first[kind]) == len(second[kind]) == 2 + 2 + 3
        last = sorted(n for ranks in (first, second) for batch in ranks[kind][4:] for n in batch)
        assert last == list(range(start, start + 12))
    assert "RanksDifferError" in first["GrowsOnOneRank"]
    assert "8 on rank 0; 12 on rank 1" in first["GrowsOnOneRank"]
    assert "train_dataloader assigned (False on rank 0; True on rank 1)" in first["ReplacesOnOneRank"]
