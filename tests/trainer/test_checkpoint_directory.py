"""Checkpoints on another disk: the run has a link to them, which a restart, every command and a second run follow."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dream_trainer.checkpoint import run_directory
from tests.api import CheckpointError, main
from tests.trainer.saves import STEPS, Saves, fit, make_config, run

PLACE = Path("tests/checkpoint/run")


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DREAM_TRAINER_RUNS", raising=False)


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
