"""What `dream-trainer runs` and `config diff` say of runs that go on from a checkpoint: what trained, from where."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.api import BranchParameters, read_record
from tests.cli.test_runs_command import said
from tests.trainer.saves import Saves, run

GROUP = Path("runs/tests/checkpoint")
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
    assert read_record(GROUP / "branch").parent["words"]["optimizer"] == "moments"  # type: ignore[union-attr, index]


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
    before = (GROUP / "parent/run.json").read_text()
    train("parent", 0.01)  # nothing to train either, and its record stays that of its training
    assert (GROUP / "parent/run.json").read_text() == before
