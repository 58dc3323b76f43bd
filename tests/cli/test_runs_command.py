"""`dream-trainer runs` and `config show | diff` as one types them, also of runs that go on from a checkpoint."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.api import BranchParameters, RunRecord, main, read_record, write_record
from tests.trainer.saves import Saves, run

NOW = time.time()


def make_run(name: str, *, lr: float, record: RunRecord | None, root: str = "runs", **more: Any) -> Path:
    path = Path(root, "p", name)
    path.mkdir(parents=True)
    config = {"project": "p", "group": path.parent.name, "experiment": path.name, "optimizer": {"lr": lr}, "seed": 1}
    (path / "config.json").write_text(json.dumps(config | more))
    if record is not None:
        write_record(path, record)
    return path


def best(value: float, mode: str = "min") -> dict[str, Any]:
    return {"val/loss": {"value": value, "step": 7, "mode": mode}}


@pytest.fixture
def runs() -> None:
    make_run("a/one", lr=0.1, record=RunRecord(state="finished", started=NOW - 90, step=10, best=best(2.125)))
    failed = RunRecord(state="failed", why="ValueError: nan", started=NOW - 80, step=3, best=best(1.0), seconds=7200)
    make_run("a/two", lr=0.2, record=failed, dropout=0.5)
    dead = make_run("b/three", lr=0.1, record=RunRecord(state="running", started=NOW - 70, step=2))
    (dead / "run.lock").write_text("")
    line = {"step": 5, "time": NOW - 30}
    (dead / "metrics.jsonl").write_text(json.dumps(line) + '\n{"step": 9, "ti')
    make_run("b/old", lr=0.3, record=None)
    elsewhere = RunRecord(state="running", started=NOW - 60, host="another", best=best(float("nan")))
    make_run("b/far", lr=0.1, record=elsewhere)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(arguments) == code
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out


@pytest.mark.usefixtures("runs")
def test_runs_are_listed_with_state_step_best_and_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "runs").splitlines()
    cells = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[2:]}
    assert lines[0] == "runs"
    assert lines[1].split() == "run state step best took seen lr dropout".split()
    assert list(cells) == ["p/b/old", "p/a/one", "p/a/two", "p/b/three", "p/b/far", "p/a/two:"]
    assert cells["p/a/one"].startswith("finished 10 val/loss 2.125 at 7")
    assert cells["p/a/one"].endswith(" 0.1 -")
    assert cells["p/a/two"].endswith(" 2:00:00 - 0.2 0.5")
    assert cells["p/b/three"].startswith("dead 5 ")  # the log is further than the record
    assert cells["p/b/old"].startswith("- 0 ")
    assert cells["p/b/far"].startswith("unknown 0 val/loss nan")
    assert lines[-1] == "p/a/two: failed at step 3: ValueError: nan"


@pytest.mark.usefixtures("runs")
def test_one_run_is_shown_with_its_end_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in said(capsys, "runs", "show", "runs/p/a/two").splitlines()]
    shown = [" ".join(row) for row in rows]
    assert shown[0] == "runs/p/a/two"
    for line in ("state failed", "why ValueError: nan", "trained for 2:00:00", "best val/loss 1 at step 7", "ranks 1"):
        assert line in shown
    assert any(line.startswith("step 3 (epoch 0") for line in shown)
    whole = json.loads(said(capsys, "runs", "show", "runs/p/a/two", "--json"))
    assert (whole["record"]["step"], whole["config"]["dropout"]) == (3, 0.5)
    for wrong in ("runs/p/a", "runs/p/none"):
        assert f"{wrong} is no run's directory" in said(capsys, "runs", "show", wrong, code=2)


@pytest.mark.usefixtures("runs")
def test_two_runs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "config", "diff", "runs/p/a/one", "runs/p/a/two", "--json", code=1))
    assert found == {"experiment": ["one", "two"], "optimizer.lr": [0.1, 0.2], "dropout": [None, 0.5]}
    assert "optimizer.lr  0.1  0.2" in said(capsys, "config", "diff", "runs/p/a/one", "runs/p/a/two", code=1)
    assert "are the same" in said(capsys, "config", "diff", "runs/p/a/one", "runs/p/a/one")


@pytest.mark.usefixtures("runs")
def test_the_list_is_narrowed_and_ordered(capsys: pytest.CaptureFixture[str]) -> None:
    def names(*arguments: str) -> list[str]:
        return [run["name"] for run in json.loads(said(capsys, "runs", *arguments, "--json"))]

    assert names("runs/p/a") == ["one", "two"]
    assert names("runs/p/b", "--sort", "name") == ["far", "old", "three"]
    assert names("--sort", "best")[:2] == ["p/a/two", "p/a/one"]
    assert names("--sort", "step")[-1] == "p/a/one"
    assert names("runs/p/a/one") == ["one"]
    make_run("c/high", lr=1.0, record=RunRecord(best=best(5.0, "max")), root="more")
    make_run("c/low", lr=1.0, record=RunRecord(best=best(3.0, "max")), root="more")
    assert names("more", "--sort", "best") == ["p/c/high", "p/c/low"]


@pytest.mark.usefixtures("runs")
def test_a_scripts_own_fields_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        framework = {"training_parameters": dict.fromkeys("abcdef", number), "hidden": number, "width": [number]}
        make_run(f"d/{number}", lr=0.1, record=RunRecord(metrics={"val/loss": number}), root="own", **framework)
    _, header, first, _, hidden = said(capsys, "runs", "own").splitlines()
    assert header.split()[-5:] == ["hidden", "width", "a", "b", "c"]
    assert first.split()[-5:] == ["0", "[0]", "0", "0", "0"]
    assert hidden.endswith(": training_parameters.d, training_parameters.e, training_parameters.f")


@pytest.mark.usefixtures("runs")
def test_the_environment_places_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs").rename("others")
    assert "runs is not a directory" in said(capsys, "runs", code=2)
    monkeypatch.setenv("DREAM_TRAINER_RUNS", "others")
    assert "p/a/one" in said(capsys, "runs")
    Path("empty").mkdir()
    assert said(capsys, "runs", "empty") == "empty has no runs yet.\n"


@pytest.mark.usefixtures("runs")
def test_a_config_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "optimizer.lr  0.1\n" in said(capsys, "config", "show", "runs/p/a/one")
    assert json.loads(said(capsys, "config", "show", "runs/p/a/one/config.json", "--json"))["seed"] == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("config show runs/p/none", "runs/p/none does not exist. Give a run's directory"),
        ("config diff runs/p/none runs/p/a/one", "runs/p/none does not exist. Give a run's directory"),
        ("config diff bad.json bad.json", "bad.json is not valid"),
        ("config diff list.json bad.json", "holds no config"),
        ("runs absent", "absent is not a directory"),
        ("runs --metric val/lss", "no run has it. Did you mean val/loss? There are val/loss."),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: str, told: str) -> None:
    Path("bad.json").write_text("{")
    Path("list.json").write_text("[]")
    line = said(capsys, *arguments.split(), code=2)
    assert told in line
    assert line.count("\n") == 1


EVERY_TWO: dict[str, Any] = {"save_every_n_steps": 2, "save_every_n_epochs": None}


def train(name: str, rate: float, steps: int = 4, **checkpoint: Any) -> Saves:
    return run(experiment=name, learning_rate=rate, training={"max_steps": steps}, **EVERY_TWO | checkpoint)


def column(text: str, name: str) -> dict[str, str]:
    """The cells of a column by run; columns are told apart by two spaces."""
    header, *rows = [re.split(r"  +", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    return {row[0].removeprefix("tests/checkpoint/"): row[header.index(name)] for row in rows}


def test_the_words_a_branch_began_with_stay_after_a_start_without(capsys: pytest.CaptureFixture[str]) -> None:
    parent = str(train("parent", 0.01).checkpoint_dir / "step_00000002")
    train("branch", 0.003, resume=parent, branch=BranchParameters(optimizer="moments"))
    train("branch", 0.003, 6, resume="auto")
    assert column(said(capsys, "runs"), "branch.optimizer") == {"parent": "-", "branch": "moments"}
    assert read_record(Path("runs/tests/checkpoint/branch")).parent["words"]["optimizer"] == "moments"  # type: ignore[union-attr, index]


def test_what_a_branch_began_from_is_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    parent = train("parent", 0.01)
    assert "began from" not in said(capsys, "runs")
    train("branch", 0.01, 6, resume=str(parent.run_dir))
    listed = said(capsys, "runs")
    assert column(listed, "began from") == {"parent": "-", "branch": "tests/checkpoint/parent at 4"}


def test_a_branch_with_nothing_left_to_train_says_so_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    parent = train("parent", 0.01)
    train("branch", 0.01, resume=str(parent.run_dir))
    listed = said(capsys, "runs")
    assert (column(listed, "state")["branch"], column(listed, "step")["branch"]) == ("finished", "4")
    assert "tests/checkpoint/branch: finished at step 4: nothing to train: 4 of 4 steps are done" in listed
    before = Path("runs/tests/checkpoint/parent/run.json").read_text()
    train("parent", 0.01)  # nothing to train either, and its record stays that of its training
    assert Path("runs/tests/checkpoint/parent/run.json").read_text() == before
