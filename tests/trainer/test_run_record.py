"""What every run writes down about itself, whatever its mixins and loggers: its config, how far it is, how it ended;
and where its time went, whose parts add up to all of it, over kills too."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import dream_trainer as dt
from dream_trainer.trainer import run_record
from tests.api import (
    CheckpointError,
    DistributedDataLoader,
    PerRankLoader,
    RunRecord,
    Start,
    is_alive,
    read_record,
    receipt,
)
from tests.programs import run_programs
from tests.trainer import small
from tests.trainer.saves import Saves, fit, fit_scripted, make_config, run
from tests.trainer.small import BY_BLOCKS, Alone, Batch, Built, Spread, batches
from tests.worlds import run_world

RUN = Path("runs/tests/checkpoint/run")
ALONE = Path("runs/tests/trainer/run")


def record_of(run_dir: Path) -> RunRecord:
    record = read_record(run_dir)
    assert record is not None
    return record


def test_the_barest_trainer_keeps_its_config_and_its_record() -> None:
    with Alone(small.make_config(max_steps=3, seed=7), batches(4)) as trainer:
        assert not ALONE.exists()
        trainer.fit()
    assert json.loads((ALONE / "config.json").read_text())["seed"] == 7
    record = record_of(ALONE)
    assert (record.state, record.why, record.step, record.samples, record.starts) == ("finished", None, 3, 6, 1)
    assert record.argv == sys.argv
    assert record.pid == os.getpid()
    assert {path.name for path in ALONE.iterdir()} == {"config.json", "run.json"}


def test_nothing_is_written_by_a_trial_an_evaluation_or_without_a_disk(caplog: pytest.LogCaptureFixture) -> None:
    fit(Alone(small.make_config(fast_dev_run=True), batches(4)))
    assert not Path("runs").exists()
    with Saves(make_config()) as trainer:
        trainer.evaluate()
    assert {path.name for path in RUN.iterdir()} == {"run.lock"}
    ALONE.parent.mkdir(parents=True)
    ALONE.write_text("a file where the directory would be")
    trainer = fit(Alone(small.make_config(max_steps=3), batches(4)))
    assert trainer.global_step == 3
    assert caplog.text.count("the run's record of itself is not written") == 1


def test_best_values_have_their_step_and_outlive_a_restart() -> None:
    fit_scripted((0.5, -1.0, float("nan")))
    record = record_of(RUN)
    assert record.best["val/loss"] == {"value": -1.0, "step": 2, "mode": "min"}
    assert str(record.metrics["val/loss"]) == "nan"
    fit_scripted((0.5, -1.0, float("nan"), 3.0))
    record = record_of(RUN)
    assert record.best["val/loss"] == {"value": -1.0, "step": 2, "mode": "min"}
    assert (record.step, record.starts, record.metrics) == (4, 2, {"val/loss": 3.0})
    fit_scripted((2.5, 0.5), save_every_n_steps=1, experiment="back")
    fit_scripted((2.5, 0.75), resume=1, experiment="back")  # of before the best
    assert record_of(RUN.with_name("back")).best["val/loss"] == {"value": 0.75, "step": 2, "mode": "min"}


def test_a_branch_that_keeps_its_counters_keeps_the_best_values_of_its_checkpoint_everywhere() -> None:
    def branch(experiment: str, counters: Any, script: tuple[float, ...]) -> Any:
        words = dt.BranchParameters(counters=counters)
        return fit_scripted(script, experiment=experiment, resume=str(parent / "step_00000002"), branch=words)

    parent = fit_scripted((0.75, 0.5, -1.0), save_every_n_steps=1).checkpoint_dir
    kept = branch("kept", "keep", (9.0, 9.0, 2.5))
    assert kept.best == {"val/loss": 0.5}  # the one of step 3 was later
    assert record_of(RUN.with_name("kept")).best["val/loss"] == {"value": 0.5, "step": 2, "mode": "min"}
    assert branch("new", "new", (2.5,)).best == {"val/loss": 2.5}
    assert record_of(RUN.with_name("new")).best["val/loss"] == {"value": 2.5, "step": 1, "mode": "min"}


def test_a_run_that_is_resumed_before_fit_keeps_the_times_of_its_earlier_starts() -> None:
    run(training={"max_steps": 2})
    with Saves(make_config(training={"max_steps": 4})) as trainer:
        trainer.launch_and_resume()
        trainer.fit()
    assert [one["first_step"] for one in record_of(RUN).times] == [0, 2]


def test_a_run_that_goes_on_with_other_code_names_the_files_that_changed(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("layers_of_a_user", "data_of_a_user"):
        (tmp_path / f"{name}.py").write_text("ACTIVATION = 'relu'\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.import_module(name)
    changed = Path("layers_of_a_user.py")
    run(training={"max_steps": 2})
    assert record_of(RUN).code.keys() >= {"layers_of_a_user.py", "data_of_a_user.py"}
    assert not any("site-packages" in path or "dream_trainer/" in path for path in record_of(RUN).code)
    changed.write_text("ACTIVATION = 'gelu'\n")
    run(experiment="another", training={"max_steps": 2})
    assert "other code" not in caplog.text
    for steps in (4, 6):
        run(training={"max_steps": steps})
    (line,) = [line for line in caplog.messages if "other code" in line]
    assert line == "the run resumes at step 2 with other code than its last start: layers_of_a_user.py."
    for name in ("layers_of_a_user", "data_of_a_user"):
        del sys.modules[name]


def test_a_start_that_is_refused_leaves_what_a_run_says_of_itself() -> None:
    run()
    before = {name: (RUN / name).read_text() for name in ("config.json", "run.json")}
    with pytest.raises(CheckpointError, match="seed"):
        run(training={"n_epochs": 2}, seed=7)
    assert {name: (RUN / name).read_text() for name in before} == before


def test_a_run_that_was_asked_to_stop_says_why_and_one_that_failed_with_what() -> None:
    fit_scripted((1.0, 1.0, 1.0, 1.0), stop_after=2)
    record = record_of(RUN)
    assert (record.state, record.why, record.step) == ("stopped", "the test says so", 2)

    class Breaks(Saves):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            if self.global_step == 4:
                raise ValueError("no such luck\nmore")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="no such luck"):
        fit(Breaks(make_config()))
    record = record_of(RUN)
    assert (record.state, record.why, record.step) == ("failed", "ValueError: no such luck", 4)


def test_a_run_whose_last_start_saved_nothing_says_that_it_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    for n_before in range(2):
        run(save_every_n_epochs=None, save_at_end=False)
        assert caplog.text.count("starts at step 0 again: its last start left no complete checkpoint") == n_before


def test_while_it_runs_it_is_alive_and_a_killed_one_is_not() -> None:
    seen: list[Any] = []

    class Looks(dt.Callback):
        def post_train_step(self, trainer: Any) -> None:
            record = record_of(trainer.run_dir)
            seen.append((record.state, is_alive(trainer.run_dir, record)))

    run(callbacks=[Looks()])
    fit(Alone(small.make_config(max_steps=1, callbacks=[Looks()]), batches(2)))
    assert set(seen) == {("running", True)}
    assert is_alive(RUN, record_of(RUN)) is False  # its lock is free
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = record_of(ALONE)
    record.pid = child.pid
    assert is_alive(ALONE, record) is True
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert is_alive(ALONE, record) is False
    record.host = "another"
    assert is_alive(ALONE, record) is None


@pytest.mark.parametrize("text", ["{", '{"best": {"a": 3}}'])
def test_a_record_that_cannot_be_read_is_none_and_a_newer_one_is_read_in_part(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    assert read_record(tmp_path) is None
    (tmp_path / "run.json").write_text('{"state": "finished", "of the future": 1}')
    assert read_record(tmp_path) == RunRecord(state="finished")


class FailsOnOne(Spread):
    """Rank 1 fails in its third step; rank 0 cannot know."""

    dies = False  # or kills itself, which nobody could tell

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2 and self.world.rank == 1:
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("only here\nand more")
        return super().training_step(batch, batch_idx)


class Dies(FailsOnOne, dt.CheckpointMixin):
    """Where rank 0 has claimed the run's directory."""

    dies = True


def fail_on_one(kind: type[FailsOnOne]) -> None:
    data = DistributedDataLoader(small.Samples(16), 2)
    fit(kind(small.make_config(n_epochs=1), data))


def test_the_rank_that_fails_is_named_though_rank_0_does_not_live_to_hear_of_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run_world(fail_on_one, 2, FailsOnOne)
    record = record_of(tmp_path / ALONE)
    assert (record.state, record.why, record.failed_rank) == ("failed", "rank 1: ValueError: only here", 1)
    assert record.error is not None
    assert record.error.startswith("ValueError: only here\nand more\n  in training_step, ")
    assert record.error.endswith("ValueError: only here\nand more\n")


def test_of_a_rank_that_died_nobody_says_another_ones_cause(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run_world(fail_on_one, 2, Dies)
    record = record_of(tmp_path / ALONE)
    assert (record.state, record.failed_rank) == ("failed", 1)
    assert re.match(r"rank 1 \(process \d+ on .*\) is gone without an error: killed", str(record.why))


class Killed(small.Validates, Built, dt.DreamTrainer):
    """Saves after one step, and kills itself after another."""

    saves_at = killed_at = 0

    def post_train_step(self) -> None:
        if self.global_step == self.saves_at:
            self.save_checkpoint()
        if self.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until(saves_at: int, killed_at: int) -> None:
    run_record.WORTH_TELLING = 0.0
    config = small.run_config(
        "killed",
        training_parameters=dt.TrainingParameters(max_steps=30, val_every_n_steps=10),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None),
        logger_parameters=dt.LoggerParameters(loggers=("console", "jsonl"), log_every_n_steps=1),
    )
    trainer = Killed(config, *(DataLoader(small.Samples(length), 4) for length in (64, 8)))
    trainer.saves_at, trainer.killed_at = saves_at, killed_at
    fit(trainer)


def start(directory: Path, *steps: int) -> tuple[float, str]:
    """Returns when the program was started, and what it printed."""
    now = time.time()
    code = f"from tests.trainer.test_run_record import train_until; train_until{steps}"
    (ended,) = run_programs(code, 1, directory, {**os.environ, "RANK": "0"}, 60)
    assert ended.status == (-signal.SIGKILL if steps[1] else 0), ended.error
    return now, ended.output


def test_a_run_that_was_killed_twice_accounts_for_all_of_its_time(tmp_path: Path) -> None:
    begins, printed = zip(start(tmp_path, 6, 13), start(tmp_path, 15, 18), start(tmp_path, 0, 0), strict=True)
    ended = time.time()
    (record,) = tmp_path.glob("runs/*/*/killed/run.json")
    times = json.loads(record.read_text())["times"]
    starts = [Start.of(plain) for plain in times]
    assert [one.first_step for one in starts] == [0, 6, 15]
    assert starts[-1].last_step == 30
    assert all(one.first_step < one.last_step < killed for one, killed in zip(starts, (14, 19), strict=False))
    for one, begun, following in zip(starts, begins, [*begins[1:], ended], strict=True):
        assert begun - 0.1 <= one.began <= one.trained_from <= one.seen <= following + 0.1
    assert (told := receipt(times)) is not None
    assert told.starts == 3
    assert told.total == pytest.approx(starts[-1].seen - starts[0].began, abs=1e-6)
    assert all(told.seconds[name] > 0 for name in ("training", "again", "validation", "saving", "starting", "idle"))
    shown = subprocess.run(
        [sys.executable, "-m", "dream_trainer", "runs", "show", str(record.parent)], capture_output=True, text=True
    )
    assert f"goodput {told.goodput:.1%}" in shown.stdout
    assert "steps done twice" in shown.stdout
    lines = map(json.loads, record.with_name("metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if 0 < line.get("run/goodput", 0) < 1] == [10, 20, 30]
    assert printed[-1].splitlines()[-1] == told.words()


def test_the_parts_follow_from_what_each_start_wrote() -> None:
    # 10 s to start, 100 s of training to step 50 (20 s of it validations), a checkpoint of step 30 after 60 s; killed.
    first = Start(
        began=0, trained_from=10, seen=110, first_step=0, last_step=50, validation=20, saved=[[10, 30], [30, 70]]
    )
    second = Start(began=130, trained_from=135, seen=195, first_step=30, last_step=60, data=6, saving=3, ranks=1)
    told = receipt([vars(first), vars(second)])
    assert told is not None
    # 40 of the first start's 100 s were done again: 60% of each of its parts stays.
    expected = {"again": 40.0, "validation": 12.0, "training": 48.0 + 50.0, "data": 6.0, "saving": 3.0, "ranks": 1.0}
    assert told.seconds == pytest.approx(expected | {"starting": 15.0, "idle": 20.0})
    assert told.total == pytest.approx(195)
    assert told.goodput == pytest.approx(98 / 195)
    assert "goodput 50.3%" in told.words()
    assert "steps done twice 21%" in told.words()


def test_a_start_that_resumed_what_it_ended_with_did_nothing_twice() -> None:
    first = Start(began=0, trained_from=1, seen=5, first_step=0, last_step=10)
    second = Start(began=6, trained_from=7, seen=9, first_step=10, last_step=20)
    told = receipt([vars(first), vars(second)])
    assert told is not None
    assert told.seconds["again"] == 0
    assert told.seconds["training"] == pytest.approx(6)
    assert receipt([]) is None


class Waits(Built, dt.DreamTrainer):
    """Rank 1 sleeps between two blocks."""

    def loss_of(self, batch: Batch) -> Tensor:
        first, *others = self.model[0]
        hidden = first(batch[0])
        time.sleep(0.1 * self.world.rank)
        for block in others:
            hidden = block(hidden)
        return mse_loss(self.model[1](hidden), batch[1])


def seconds_waited() -> float:
    devices = dt.DeviceParameters(device="cpu", dp_shard=2)
    config = small.run_config(device_parameters=devices, fsdp_parameters=BY_BLOCKS)
    with Waits(config, PerRankLoader(batches(8))) as trainer:
        trainer.fit()
        return trainer._runtime.parallel.gradients.own_time.waited


def test_a_rank_waits_for_a_slow_one_in_gathers_of_weights() -> None:
    of_main, _ = run_world(seconds_waited, 2)
    assert of_main > 0.5  # 8 batches, of 0.1 s each
