"""A RunLog by itself: a counter stands in for the trainer, and a logger notes what it gets."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import api

BATCH = 4  # samples of a micro-batch


class Notes(api.Logger):
    """Every line in the order in which it came: (step, metrics)."""

    def __init__(self) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        pass

    def log(self, metrics: dict[str, float], stamp: api.Stamp) -> None:
        self.got.append((stamp.step, metrics))


class Counter:
    """A run that counts windows, and its log."""

    def __init__(
        self, run_dir: Path, *, every: int = 2, run: str = "run", loggers: tuple[api.Logger, ...] = ()
    ) -> None:
        self.step = 0
        self.records = api.Records()
        parameters = api.LoggerParameters(log_every_n_steps=every)
        self.notes = Notes()
        self.told: list[tuple[int, dict[str, float]]] = []
        self.log = api.RunLog(
            parameters,
            run_dir,
            ("tests", "loggers", run),
            records=self.records,
            training=api.TrainingRecord(lambda: (None, BATCH), lambda: None),
            config=lambda: {"seed": 3},
            stamp=self.stamp,
            notify=lambda metrics, step: self.told.append((step, metrics)),
            of_data=dict,
            warn_once=lambda key, message: None,
        )
        group = api.LoggerGroup([self.notes, *loggers], lambda key, message: None, strict=True)
        self.log.connect(api.Ranks.alone(), group)

    def stamp(self) -> api.Stamp:
        return api.Stamp(self.step, 0, BATCH * self.step, 0.0)

    def window(self, *losses: float, **ends: bool) -> None:
        self.log.window_started()
        for loss in losses:
            self.log.batch_finished({"loss": torch.tensor(loss)}, None, BATCH)
        self.step += 1
        self.log.window_finished(self.step, **ends)

    def state(self, **how: bool) -> dict[str, Any]:
        return self.log.state(self.step, **{"is_last": False, "has_failed": False} | how)

    def resume(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.log.load_state(state)


@pytest.fixture
def run(tmp_path: Path) -> Counter:
    return Counter(tmp_path)


def test_a_save_of_a_listener_finds_what_was_logged_before_it_written(run: Counter) -> None:
    run.window(1.0)
    with run.log.line_of_its_own(counts=True):
        run.records.current.add("val/rank", 7.0, None, "mean")
        state = run.state()
        assert run.told == [(1, {"val/rank": 7.0})]
    assert run.told == [(1, {"val/rank": 7.0})]
    assert state["lines"] == 1


def test_another_runs_checkpoint_brings_its_pending_numbers_and_no_loggers_state(tmp_path: Path) -> None:
    class Keeps(Notes):
        def state_dict(self) -> dict[str, Any]:
            return {"id": "theirs"}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("this is another run")

    theirs = Counter(tmp_path / "theirs", run="theirs", loggers=(Keeps(),))
    theirs.window(1.0)
    state = theirs.state()
    mine = Counter(tmp_path / "mine", run="mine", loggers=(Keeps(),))
    mine.resume(state)
    mine.window(3.0, is_last=True)
    assert mine.told == [(2, {"train/loss": 2.0})]


def test_what_was_not_flushed_is_written_unless_it_is_saved(tmp_path: Path) -> None:
    for is_saved, is_lost in ((False, False), (True, False), (True, True)):
        run = Counter(tmp_path, every=5)
        run.window(2.0)
        if is_saved:
            run.state()
        if is_lost:
            run.log.save_was_lost()
        run.log.close(1, has_trained=True)
        is_kept = is_saved and not is_lost
        assert run.told == ([] if is_kept else [(1, {"train/loss": 2.0})])
