"""What a run says of saves that it cannot make, and when it makes none; a task beside the training thread, which none
that ends leaves unfinished."""

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from dream_trainer.checkpoint import saver, store
from dream_trainer.trainer.mixins import checkpointing
from tests.trainer import saves
from tests.trainer.small import Batch
from tests.trainer.test_saving import disk_is_gone
from tests.trainer.test_when_to_save import acts, fail

THREE: dict[str, Any] = {"training": {"max_steps": 3}}


def test_a_best_metric_that_no_validation_has_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert saves.fit_scripted((1.0, None), save_on_best=True, save_at_end=False).saved == [1]
    assert "best_metric='val/loss' is not among the validation's metrics: []." in caplog.text


class Busy(saves.Saves):
    """Each step takes a minute; the first save is written when training has come to `opens_at`."""

    opens_at: int
    gate: saves.Gate
    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.seconds += 60.0
        if self.global_step == self.opens_at:
            self.gate.open()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("when_busy", "opens_at"), [("skip", 4), ("wait", 1)])
def test_a_clock_that_runs_out_while_one_is_written_waits_with_it_or_skips(when_busy: str, opens_at: int) -> None:
    gate = saves.Gate()
    trainer = Busy(saves.make_config(save_every_n_minutes=1.0, when_busy=when_busy, **saves.NOTHING))
    trainer.opens_at, trainer.gate = opens_at, gate
    with mock.patch.object(checkpointing, "time", trainer), saves.before_writing(lambda _: gate.wait()):
        saves.fit(trainer)
    assert trainer.saved[0] == 1
    assert {2, 3} & set(trainer.saved) == ({2, 3} if when_busy == "wait" else set())


def test_memory_is_made_after_the_first_window_and_only_where_there_will_be_a_save() -> None:
    for at_end in (True, False):
        with mock.patch.object(saver.HostCopies, "warm") as warm:
            saves.run(experiment=str(at_end), **THREE, save_every_n_epochs=None, save_at_end=at_end)
        made = [name for call in warm.call_args_list for name in call.args[0] if "momentum" in name]
        assert len(warm.call_args_list) == at_end == bool(made)


def test_after_an_exception_a_save_that_fails_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    trainer = acts("post_train_step", 2, fail, **saves.NOTHING)
    with mock.patch.object(store, "write_file", disk_is_gone), pytest.raises(KeyError, match="broken"):
        saves.fit(trainer)
    assert "step 2 could not be saved: CheckpointError: " in caplog.text
    assert trainer.saved == []


def test_an_exception_does_not_save_if_the_config_says_so() -> None:
    trainer = acts("post_train_step", 2, fail, save_on_exception=False, **saves.NOTHING)
    with pytest.raises(KeyError):
        saves.fit(trainer)
    assert trainer.saved == []


def test_a_run_that_comes_back_to_its_own_checkpoints_keeps_them() -> None:
    every: dict[str, Any] = {"save_every_n_steps": 1, "save_every_n_epochs": None}
    own, other = (saves.run(experiment=name, **THREE, **every) for name in ("run", "other"))
    with saves.Saves(saves.make_config(training={"max_steps": 4}, **every)) as trainer:
        for path in (other.checkpoints()[1].path, own.checkpoints()[-1].path):
            trainer.load_checkpoint(path)
        trainer.fit()
    assert saves.steps_of(trainer) == [1, 2, 3, 4]


@pytest.mark.pitfall(31)
def test_an_interpreter_that_ends_waits_for_the_task() -> None:
    code = (
        "import time\n"
        "from dream_trainer.checkpoint.saver import Background\n"
        "Background('name').start(lambda: (time.sleep(0.5), print('done')))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("done\n", 0)
