"""A Saver by itself: a counter stands in for the trainer, and the files are real."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tests import api
from tests.checkpoint.states import DESCRIPTION, make_snapshot, save

NOTHING: dict[str, Any] = {"save_every_n_epochs": None, "save_at_end": False}


class HeldCopies(api.HostCopies):
    """Copies that the writing thread gets when the test opens the gate."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.gate = threading.Event()

    def wait(self) -> None:
        assert self.gate.wait(timeout=60)


class Counter:
    """A run that only counts, and its saver."""

    def __init__(
        self,
        directory: Path,
        *,
        copies: api.HostCopies | None = None,
        only_when_called: bool = False,
        **parameters: Any,
    ) -> None:
        self.parameters = api.CheckpointParameters(**parameters)
        self.directory, self.now = directory, 0.0
        self.step, self.has_pending_work = 0, False
        self.saved: list[int] = []
        self.warmed: list[int] = []
        self.said: list[str] = []
        self.lost = 0
        self.world = api.Ranks.alone()
        self.saver = api.Saver(
            self.parameters,
            self.world,
            directory,
            self.world,
            copies,
            settle=lambda: api.Moment(self.step, self.has_pending_work),
            snapshot=self.snapshot,
            tensors=self.tensors,
            is_best=lambda step: False,
            on_save=lambda path: self.saved.append(api.read_manifest(path).step),
            on_lost=self.lose,
            patience=nullcontext,
            say_once=lambda key, message: self.said.append(message),
            clock=lambda: self.now,
            only_when_called=only_when_called,
        )

    def snapshot(self, metrics: dict[str, float], copies: api.HostCopies | None) -> api.Snapshot:
        self.now += 1  # what training waits for
        return make_snapshot(self.step, description=DESCRIPTION | {"metrics": metrics})

    def tensors(self) -> dict[str, torch.Tensor]:
        self.warmed.append(self.step)
        return {}

    def lose(self) -> None:
        self.lost += 1

    def speak(self) -> bool:
        """The pulse of a world of one: it hears what it said. Returns whether a save is due by the clock."""
        due, saving, failed = self.saver.flags()
        self.saver.heard(int(saving), int(failed))
        return due

    def train(self, windows: int = 1, *, seconds: float = 0.0, is_last: bool = False) -> None:
        for _ in range(windows):
            requested = self.speak()
            self.step += 1
            self.now += seconds
            self.saver.save_if_due(step=self.step, epoch=None, is_last=is_last, requested=requested)

    def ask(self) -> None:
        """As a request does that comes between two windows."""
        self.saver.save_if_due(step=self.step, epoch=None, is_last=False, requested=True)

    def finish(self) -> None:
        """As at a run's end."""
        self.saver.close()
        self.saver.release()

    @property
    def on_disk(self) -> list[int]:
        return [manifest.step for manifest in api.list_checkpoints(self.directory)]


@contextmanager
def counting(directory: Path, **options: Any) -> Iterator[Counter]:
    run = Counter(directory, **options)
    yield run
    run.finish()


def test_a_step_is_saved_once_and_anew_when_what_it_owed_is_done_or_one_calls_for_it(tmp_path: Path) -> None:
    with counting(tmp_path, **NOTHING | {"save_every_n_steps": 1}) as run:
        run.has_pending_work = True
        run.train()
        run.ask()
        assert run.saved == [1]
        run.has_pending_work = False
        run.saver.validated(1, {"val/loss": 0.5})
        run.ask()
        run.ask()
        assert run.saved == [1, 1]
        run.saver.save()
    assert run.saved == [1, 1, 1]
    assert [manifest.metrics for manifest in api.list_checkpoints(tmp_path)] == [{"val/loss": 0.5}]


def test_a_best_metric_that_no_validation_has_is_said(tmp_path: Path) -> None:
    with counting(tmp_path, save_on_best=True, best_metric="val/loss", **NOTHING) as run:
        run.saver.validated(run.step, {"val/accuracy": 1.0})
        run.train()
    assert run.saved == []
    assert run.said == ["best_metric='val/loss' is not among the validation's metrics: ['val/accuracy']."]


def test_what_saves_only_when_it_is_called_does(tmp_path: Path) -> None:
    with counting(tmp_path, only_when_called=True, save_every_n_steps=1) as run:
        run.train(3, is_last=True)
        run.saver.save_after_exception(3)
        assert run.saved == []
        run.saver.save()
        assert run.saved == [3]


def test_a_clock_that_runs_out_while_one_is_written_waits_with_it_or_skips(tmp_path: Path) -> None:
    for when_busy in ("skip", "wait"):
        copies = HeldCopies()
        with counting(
            tmp_path / when_busy, copies=copies, when_busy=when_busy, **NOTHING | {"save_every_n_minutes": 1.0}
        ) as run:
            run.saver.save_if_due(step=None, epoch=None, is_last=False, requested=True)
            run.now += 61
            assert run.saver.flags() == (when_busy == "wait", True, False)
            copies.gate.set()


def test_memory_is_made_after_the_first_window_and_only_where_there_will_be_a_save(tmp_path: Path) -> None:
    for saves, warmed in ((True, [1]), (False, [])):
        with counting(
            tmp_path, copies=api.HostCopies(torch.device("cpu")), save_every_n_epochs=None, save_at_end=saves
        ) as run:
            run.train()
            run.saver.finish()
            run.saver.close()
            assert run.warmed == warmed


def test_the_time_that_training_waits_is_counted(tmp_path: Path) -> None:
    with counting(tmp_path, **NOTHING | {"save_every_n_steps": 2}) as run:
        run.train(5, seconds=10)
    assert run.saver.seconds == 2


def test_after_an_exception_a_save_that_fails_is_only_said(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    directory.write_text("no directory can be made here")
    with counting(directory, **NOTHING) as run:
        run.train(2)
        run.saver.save_after_exception(2)
        assert run.said[0].startswith("step 2 could not be saved: CheckpointError: ")
        assert run.lost
        directory.unlink()
        run.saver.save_after_exception(2)
    assert run.saved == [2]


def test_an_exception_does_not_save_if_the_config_says_so(tmp_path: Path) -> None:
    with counting(tmp_path / "checkpoints", save_on_exception=False, **NOTHING) as run:
        run.train(2)
        run.saver.save_after_exception(2)
    assert run.saved == []


def test_a_run_that_comes_back_to_its_own_checkpoints_keeps_them(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for step in (1, 2, 3, 4):
        save(own, step)
    theirs = api.read_manifest(save(other, 2))
    with counting(own, **NOTHING | {"save_every_n_steps": 1}) as run:
        for manifest, is_own in ((theirs, False), (api.list_checkpoints(own)[-1], True)):
            run.saver.goes_on_from(manifest.step, manifest.metrics, is_own=is_own, has_pending_work=False)
        run.step = 4
        run.train()
    assert run.on_disk == [1, 2, 3, 4, 5]
