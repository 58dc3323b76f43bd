"""CheckpointMixin: when and where it saves, what it resumes, what it refuses, and what it says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dream_trainer as dt
from dream_trainer.checkpoint import run_directory
from tests.api import CheckpointError, ConfigError, main, parse, read_shared
from tests.trainer.saves import STEPS, Saves, fit, make_config, run, steps_of
from tests.trainer.small import Batch, assert_same_weights, weights
from tests.worlds import run_world


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [6, 12, 18]),
        ({"save_every_n_epochs": 2}, [12, 18]),
        ({"save_every_n_steps": 5, "save_at_end": False}, [5, 10, 15]),
        ({"save_every_n_steps": 4, "save_every_n_epochs": 1}, [4, 6, 8, 12, 16, 18]),
        ({"save_every_n_epochs": None, "save_at_end": False}, []),
    ],
    ids=str,
)
def test_checkpoints_are_written_when_the_parameters_say(options: dict[str, Any], steps: list[int]) -> None:
    trainer = run(training={"n_epochs": 3}, **options)
    assert trainer.saved == steps_of(trainer) == steps


def test_a_step_on_the_command_line_is_a_step_and_no_path() -> None:
    arguments = ["--checkpoint-parameters.resume"]
    found = [
        parse(make_config(), [*arguments, text]).checkpoint_parameters.resume for text in ("4", "None", "a/b", "auto")
    ]
    assert found == [4, None, "a/b", "auto"]


def test_fast_dev_run_writes_no_checkpoint_and_reads_none() -> None:
    run()
    trainer = run(training={"n_epochs": 1, "fast_dev_run": True}, save_every_n_steps=1)
    assert trainer.global_step == 1
    assert trainer.saved == trainer.loaded == []
    assert steps_of(trainer) == [6]


@pytest.mark.pitfall(6)
def test_saved_counters_are_those_of_the_completed_work() -> None:
    training = {"max_steps": 4, "gradient_accumulation_steps": 2}
    trainer = run(training=training, save_every_n_steps=1)
    saved = [(m, read_shared(m.path)["progress"]) for m in trainer.checkpoints()]
    names = ("global_step", "current_epoch", "epoch_steps", "batch_idx", "samples_seen")
    assert [tuple(progress[name] for name in names) for _, progress in saved] == [
        (1, 0, 1, 2, 4),
        (2, 0, 2, 4, 8),
        (3, 1, 0, 0, 12),
        (4, 1, 1, 2, 16),
    ]
    assert [(m.step, m.epoch, m.samples_seen) for m, _ in saved] == [(1, 0, 4), (2, 0, 8), (3, 1, 12), (4, 1, 16)]


@pytest.mark.parametrize("is_registered", [False, True])
def test_state_of_a_type_that_cannot_be_kept_is_an_error_before_the_first_step(is_registered: bool) -> None:
    class Holds(Saves):
        def configure_models(self) -> None:
            super().configure_models()
            self.register_state("lock", lambda: {"inner": object() if is_registered else 1}, lambda saved: None)

        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | ({} if is_registered else {"model": {"inner": object()}})

    trainer = Holds(make_config())
    with pytest.raises(TypeError, match="object" if is_registered else r"user\.model\.inner"):
        fit(trainer)
    assert trainer.local_batches == 0


class Counts(dt.Callback):
    """Counts the steps it saw, in all processes."""

    def __init__(self, start: int = 0) -> None:
        self._seen = start

    def post_train_step(self, trainer: Any) -> None:
        self._seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]


@pytest.mark.pitfall(50)
def test_callbacks_of_one_class_get_their_own_state_and_lost_ones_are_named(caplog: pytest.LogCaptureFixture) -> None:
    loses, new_comer = (type(name, (Counts,), {})() for name in ("Loses", "NewComer"))
    run(callbacks=[Counts(), loses, Counts(100)])
    one, two = Counts(), Counts()
    run(training={"n_epochs": 2}, callbacks=[one, two, new_comer])
    assert (one._seen, two._seen) == (12, 112)
    assert "no state of callback NewComer" in caplog.text
    assert "no longer there: Loses" in caplog.text


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_path_is_resumed_instead_of_the_newest(is_absolute: bool) -> None:
    earlier = run(training={"n_epochs": 2}, save_every_n_steps=2)
    path = earlier.checkpoint_dir / "step_00000004"
    trainer = run(experiment="other", training={"n_epochs": 2}, resume=str(path.resolve() if is_absolute else path))
    assert trainer.loaded == ["step_00000004"]
    assert trainer.seen == earlier.seen[4:]
    assert_same_weights(weights(trainer.model), weights(earlier.model))


def test_a_step_that_was_not_saved_is_an_error_that_lists_those_that_were() -> None:
    run(save_every_n_steps=2)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint of step 3. There are steps \[2, 4, 6\]"):
        run(resume=3)


def test_none_in_a_used_directory_is_an_error_and_in_a_fresh_one_a_start() -> None:
    assert run(resume=None).global_step == STEPS
    with pytest.raises(ConfigError, match=r"resume=None.*checkpoints has 1 checkpoint"):
        run(resume=None)


@pytest.mark.pitfall(41)
def test_a_finished_run_started_again_trains_nothing() -> None:
    first = run()
    files = {path: path.stat().st_mtime_ns for path in first.run_dir.rglob("*") if path.name != "run.lock"}
    again = run()
    assert again.losses == again.saved == []
    assert (again.global_step, again.current_epoch) == (STEPS, 1)
    assert_same_weights(weights(again.model), weights(first.model))
    assert {p: p.stat().st_mtime_ns for p in again.run_dir.rglob("*") if p.name != "run.lock"} == files


@pytest.mark.pitfall(40)
@pytest.mark.pitfall(41)
@pytest.mark.parametrize("limit", [{"n_epochs": 3}, {"max_steps": 9}, {"max_samples": 30}], ids=str)
def test_a_finished_run_goes_on_under_a_larger_limit(limit: dict[str, int]) -> None:
    straight = run(experiment="straight", training=limit)
    run()
    longer = run(training=limit)
    assert straight.seen[STEPS:] == longer.seen != []
    assert_same_weights(weights(longer.model), weights(straight.model))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"seed": 43}, r"seed=42, and this run has 43.*Set seed=42.*another name, such as experiment='run-seed-43'"),
        ({"training": {"n_epochs": 2, "gradient_accumulation_steps": 2}}, "global_batch_size=2, and this run has 4"),
    ],
)
def test_another_seed_or_global_batch_is_refused(changed: dict[str, Any], told: str) -> None:
    run()
    with pytest.raises(CheckpointError, match=told):
        run(**{"training": {"n_epochs": 2}} | changed)


@pytest.mark.pitfall(56)
def test_an_edited_learning_rate_is_reported_and_other_fields_are_not(caplog: pytest.LogCaptureFixture) -> None:
    run()
    run(training={"n_epochs": 2}, learning_rate=0.05)
    (message,) = [line for line in caplog.messages if "config differs" in line]
    assert "learning_rate: 0.1 -> 0.05" in message
    assert "training_parameters.n_epochs: 1 -> 2" in message
    assert message.count("->") == 2
    assert "The new values apply, unless another line says" in message
    caplog.clear()
    run(training={"n_epochs": 2}, learning_rate=0.05)
    assert "config differs" not in caplog.text


BEST = {"save_on_best": True, "best_metric": "val/distance", "best_mode": "min", "training": {"n_epochs": 3}}


class BestInTheMiddle(Saves):
    """Whose second epoch of three has the best validation."""

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        return {"distance": float(abs(self.global_step - 2 * self.steps_per_epoch))}

    def pre_epoch(self) -> None:
        if self.config.experiment == "loads" and self.current_epoch == 2:
            self.load_best()  # while the checkpoint of this moment may still be written

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        vars(self).setdefault("validated", {})[metrics["val/distance"]] = weights(self.model)


class Wrapped(BestInTheMiddle):
    """Its model is what `torch.compile` returns."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model = torch.compile(self.model, backend="eager")


def best_and_last(kind: type[BestInTheMiddle]) -> tuple[bool, bool, bool]:
    """Whether the best weights are those of the best validation, whether they are the last, and whether fit goes on."""
    with kind(make_config(keep_best=1, **BEST)) as trainer:
        with pytest.raises(CheckpointError, match=r"no checkpoint has a value of val/distance but NaN\. Train first"):
            trainer.load_best()
        trainer.fit()
        best, last = vars(trainer)["validated"][0.0], weights(trainer.model)
        assert trainer.load_best() == trainer.best_checkpoint().path
        found = weights(trainer.model)
        trainer.fit_epoch()
        moved = weights(trainer.model)
    same = [all(torch.equal(found[name], one[name]) for name in found) for one in (best, last, moved)]
    return same[0], same[1], same[2]


def loaded_in_mid_run() -> bool:
    """Whether training went on from the best weights, which all ranks have, as if nothing had been loaded."""
    found = []
    for experiment in ("loads", "straight"):
        with BestInTheMiddle(make_config(experiment=experiment, keep_best=1, **BEST)) as trainer:
            trainer.fit()
            found.append(weights(trainer.model))
    return all(torch.equal(found[0][name], found[1][name]) for name in found[1])


def test_the_best_is_loaded_in_mid_run_on_all_ranks_alike() -> None:
    assert run_world(loaded_in_mid_run, 2) == [True, True]


def test_a_best_that_was_not_kept_is_said_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    with BestInTheMiddle(make_config(keep_last=1, **BEST)) as trainer:
        trainer.fit()
        assert trainer.load_best().name == "step_00000018"
        with pytest.raises(ConfigError, match="'minimum'"):
            trainer.best_checkpoint(mode="minimum")  # type: ignore[arg-type]
    said = "takes the weights of step 18, with val/distance 6, and the best was 0.0: this run has no checkpoint of it"
    assert said in caplog.text
    assert "keep_best=1" in caplog.text


@pytest.mark.parametrize(("kind", "ranks"), [(BestInTheMiddle, 1), (BestInTheMiddle, 2), (Wrapped, 1)])
def test_the_weights_of_the_best_validation_are_loaded_and_trained_on(kind: Any, ranks: int) -> None:
    assert run_world(best_and_last, ranks, kind) == [(True, False, False)] * ranks


PLACE = Path("tests/checkpoint/run")


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step_*"))


def test_checkpoints_lie_on_the_other_disk_and_the_run_goes_on_from_them_and_keeps_the_rules_there() -> None:
    straight = run(experiment="straight", training={"n_epochs": 2})
    run(directory="disk")
    assert steps_in("disk" / PLACE) == ["step_00000006"]
    assert Path("runs", PLACE, "checkpoints").readlink() == Path("disk", PLACE).absolute()
    again = run(directory="disk", training={"n_epochs": 2}, keep_last=1)
    assert (again.loaded, steps_in("disk" / PLACE)) == (["step_00000006"], ["step_00000012"])
    for name, value in straight.model.state_dict().items():
        assert value.equal(again.model.state_dict()[name])


def test_a_restart_that_does_not_name_the_disk_follows_the_link() -> None:
    run(directory="disk")
    assert run(training={"n_epochs": 2}).loaded == ["step_00000006"]
    assert steps_in("disk" / PLACE) == ["step_00000006", "step_00000012"]
    shutil.rmtree("runs")  # the disk outlives the run's own directory
    assert run(directory="disk", training={"n_epochs": 2}).global_step == 2 * STEPS


@pytest.mark.parametrize("way", [Path("runs") / PLACE, "disk" / PLACE])
def test_every_command_follows(way: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> Any:
        assert main(["checkpoints", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    run(directory="disk", save_every_n_steps=2)
    assert [entry["step"] for entry in command("ls", str(way))["checkpoints"]] == [2, 4, 6]
    assert command("verify", str(way))["whole"] is True
    assert command("show", str(way))["step"] == 6
    with Saves(make_config()) as trainer:
        trainer.evaluate()  # a live job
        assert main(["checkpoints", "prune", str(way), "--keep-last", "1"]) == 1
        assert "a live job writes to" in capsys.readouterr().err
    assert main(["checkpoints", "prune", str(way), "--keep-last", "1"]) == 0
    assert "removed 2 (" in capsys.readouterr().out
    assert steps_in("disk" / PLACE) == ["step_00000006"]


def test_two_runs_directories_cannot_write_to_one_place_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dream_trainer.checkpoint.run_directory.PATIENCE_SECONDS", 0.3)
    with Saves(make_config(directory="disk")) as first:
        first.fit()
        monkeypatch.setenv("DREAM_TRAINER_RUNS", "others")
        held = dict(run_directory._held)
        run_directory._held.clear()  # another process holds nothing of this one's
        with pytest.raises(CheckpointError, match="another live job writes to disk/tests/checkpoint/run"):
            fit(Saves(make_config(directory="disk")))
        run_directory._held.update(held)


def test_checkpoints_in_two_places_are_an_error() -> None:
    run()
    with pytest.raises(CheckpointError, match=r"has 1 checkpoints in .*runs/tests/checkpoint/run/checkpoints.*Move"):
        run(directory="disk")


def test_a_disk_that_is_not_mounted_is_not_taken_for_an_empty_one() -> None:
    run(directory="disk")
    Path("disk").rename("unmounted")
    for options in ({}, {"directory": "disk"}):
        with pytest.raises(CheckpointError, match="which is not there: is that disk mounted"):
            run(**options)
    assert not Path("disk").exists()
