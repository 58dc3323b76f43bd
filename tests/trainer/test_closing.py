"""The end of a trainer or a step: all is let go though a part fails, and the user's exception is shown."""

import fcntl
import logging
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer.distributed import job
from tests.api import DistributedDataLoader, Logger, Stamp, StepError
from tests.trainer.small import Alone, Batch, Samples, Spread, batches, make_config, told
from tests.worlds import run_world


class Places(Logger):
    """Fails in its `close`, if asked to."""

    def __init__(self, closes: bool = True) -> None:
        self.closes = closes
        self.steps: list[int] = []
        self.is_open = False

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        self.is_open = True

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        self.steps.append(stamp.step)

    def close(self) -> None:
        self.is_open = False
        if not self.closes:
            raise OSError("the disk is full")


class Ends(Alone, dt.CheckpointMixin, dt.LoggerMixin):
    """May fail anywhere."""

    places: tuple[Places, ...] = ()
    fails_in = ""

    def configure_loggers(self) -> list[Logger]:
        return list(self.places)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 3 and self.fails_in == "step":
            raise KeyError("the cause")
        if self.global_step == 3 and self.fails_in == "log":
            self.log("x", 1.0)
            self.log("x", 1.0, reduce="max")
        return super().training_step(batch, batch_idx)

    def teardown(self) -> None:
        if self.fails_in == "teardown":
            raise RuntimeError("torn")


def ending(*places: Places, fails_in: str = "", every: int = 1, callbacks: Sequence[dt.Callback] = ()) -> Ends:
    config = make_config(n_epochs=1, callbacks=callbacks)
    config.logger_parameters = dt.LoggerParameters(loggers=(), log_every_n_steps=every, strict=True)
    trainer = Ends(config, batches(5))
    trainer.places, trainer.fails_in = places, fails_in
    return trainer


def directory_is_free() -> bool:
    """Whether another process could claim the run directory: a lock on a file opened anew is one of its own."""
    (path,) = Path("runs").rglob("run.lock")
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_after_failed_teardowns_all_is_closed_with_its_last_line_and_the_first_exception_is_raised() -> None:
    class Fails(dt.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def teardown(self, trainer: Any) -> None:
            raise OSError(self.name)

    broken, whole = Places(closes=False), Places()
    callbacks = [Fails("one"), Fails("two")]
    trainer = ending(broken, whole, fails_in="teardown", every=10, callbacks=callbacks)
    trainer.fit()
    assert not directory_is_free()
    trainer.log("last", 1.0)
    with pytest.raises(RuntimeError, match="torn") as raised:
        trainer.close()
    assert broken.steps == whole.steps == [5, 5]
    assert not broken.is_open
    assert not whole.is_open
    assert directory_is_free()
    notes = raised.value.__notes__
    assert len(notes) == 3
    assert all(text in note for text, note in zip(("one", "two", "OSError: the disk is full"), notes, strict=True))


@pytest.mark.parametrize(
    ("fails_in", "closes", "lines"),
    [("step", True, 0), ("log", True, 0), ("step", False, 1), ("with", False, 1)],
    ids=str,
)
def test_an_exception_is_shown_once_with_at_most_a_line_of_what_failed_after_it(
    fails_in: str, closes: bool, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = ending(Places(closes), fails_in=fails_in)

    def script() -> None:
        with trainer:
            trainer.fit()
            raise KeyError("the cause")

    expected = ValueError if fails_in == "log" else KeyError
    with caplog.at_level(logging.WARNING, "dream_trainer"), pytest.raises(expected) as raised:
        script()
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("Traceback") == 1
    assert shown.rstrip().endswith(str(raised.value))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["the trainer could not be closed: OSError: the disk is full"] * lines
    assert directory_is_free()
    if fails_in == "step":
        assert [manifest.step for manifest in trainer.checkpoints()] == [3]


def test_who_fails_on_an_exception_hides_neither_it_nor_keeps_it_from_the_others() -> None:
    heard: list[BaseException] = []

    class Fails(dt.Callback):
        def on_exception(self, trainer: Any, exc: BaseException) -> None:
            raise OSError("no room for a report")

    class Hears(dt.Callback):
        def on_exception(self, trainer: Any, exc: BaseException) -> None:
            heard.append(exc)

    trainer = ending(fails_in="step", callbacks=[Fails(), Hears()])
    with pytest.raises(KeyError, match="the cause") as raised, trainer:
        trainer.fit()
    assert heard == [raised.value]
    assert "OSError: no room for a report" in raised.value.__notes__[0]
    assert [manifest.step for manifest in trainer.checkpoints()] == [3]


def close_one_after_the_other() -> tuple[list[str], int]:
    """Rank 0 closes more than a second before rank 1."""
    job.SAYS_SO_AFTER_SECONDS = 0.3
    trainer = Spread(make_config(max_steps=2), DistributedDataLoader(Samples(8), 2))
    trainer.fit()
    if not trainer.world.is_main:
        time.sleep(1.5)
    with told() as lines:
        trainer.close()
    return [line for line in lines if "closes its trainer" in line], trainer.global_step


def test_a_rank_that_closes_alone_says_that_it_waits_for_the_others() -> None:
    (told, steps), (other, _) = run_world(close_one_after_the_other, 2)
    assert steps == 2
    assert len(told) == 1
    assert "have every rank close" in told[0]
    assert other == []


class SavesWhenSaved(Alone, dt.CheckpointMixin):
    def on_save(self, path: Path) -> None:
        self.save_checkpoint()


def test_a_save_in_on_save_is_refused_and_not_without_end() -> None:
    with SavesWhenSaved(make_config(max_steps=2), batches(2)) as trainer:
        trainer.fit()
        with pytest.raises(StepError, match="called in on_save"):
            trainer.save_checkpoint()


class Refused(Spread, dt.CheckpointMixin):
    """Gives `step` another model's optimizer, which it refuses, in the window after `refused_after` steps."""

    refused_after: int | None = 3
    catches = False

    def configure_models(self) -> None:
        super().configure_models()
        self.other = nn.Linear(1, 1)

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.other_optimizer = torch.optim.SGD(self.other.parameters())

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        is_refused = self.global_step == self.refused_after
        try:
            self.step(self.model, self.other_optimizer if is_refused else self.optimizer)
        except StepError:
            if not self.catches:
                raise
        return {}


def refused() -> Refused:
    return Refused(make_config(n_epochs=1, checkpoint=dt.CheckpointParameters()), batches(6))


def test_a_step_that_is_refused_is_none_and_the_last_finished_one_is_saved() -> None:
    with refused() as trainer:
        with pytest.raises(StepError, match="updates none of its parameters"):
            trainer.fit()
        assert [checkpoint.step for checkpoint in trainer.checkpoints()] == [3]
        trainer.refused_after = None
        trainer.fit()
        assert trainer.global_step == 6


def test_a_window_whose_only_step_was_refused_is_not_counted() -> None:
    trainer = refused()
    trainer.catches = True
    with pytest.raises(StepError, match=r"ended with backward\(\) but no step\(\)"):
        trainer.fit()
    assert trainer.global_step == 3
    trainer.close()


def test_a_save_before_setup_is_an_error() -> None:
    with pytest.raises(StepError, match="before the trainer is set up"):
        refused().save_checkpoint()


def test_a_closed_trainers_files_stay_where_they_are() -> None:
    with refused() as trainer:
        trainer.refused_after = None
        trainer.fit()
    directory = trainer.run_dir
    trainer.config.experiment = "another"
    assert trainer.run_dir == directory
    assert [checkpoint.step for checkpoint in trainer.checkpoints()] == [6]
