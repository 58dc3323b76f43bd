"""A run with a name says what it was made of, in its record and when it is found again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from tests.api import CheckpointError, main
from tests.simple.loops import classifier, make, samples
from tests.trainer.small import fit


def test_a_run_that_was_there_names_what_differs_and_trains_nothing(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"name": "run", "optimizer": "adam", "train": samples().tensors, "batch_size": 4}
    first = fit(make(lr=0.01, **options))
    longer = nn.Sequential(classifier(), nn.Linear(3, 3))
    with make(longer, lr=0.01, **options) as other, pytest.raises(CheckpointError):
        other.fit()
    caplog.clear()
    with make(loss="nll", lr=0.5, **options) as again:
        assert again.fit() == first.history
    text = " ".join(caplog.text.split())
    for said in ("nothing to train at step 6", "given_objects.loss: ", "-> 'nll'", "this config has lr=0.5"):
        assert said in text


def test_what_was_given_is_in_the_record_of_the_run_and_tells_runs_apart(capsys: pytest.CaptureFixture[str]) -> None:
    data = samples().tensors
    for name, lr, size in (("a", 0.01, 4), ("b", 0.1, 8)):
        options = {"metrics": ["accuracy"], "optimizer": torch.optim.SGD, "lr": lr, "schedule": "cosine"}
        fit(make(train=data, val=data, batch_size=size, name=name, **options))
    config = json.loads(Path("runs/simple/simple/b/config.json").read_text())
    given = config["given_objects"]
    assert (given["lr"], given["schedule"], given["metrics"]) == (0.1, "cosine", ["accuracy"])
    assert (given["model"], given["optimizer"]["name"], given["optimizer"]["momentum"]) == ("Sequential", "SGD", 0)
    assert "cross_entropy" in given["loss"]
    assert main(["runs", "runs"]) == 0
    rows = [row.split()[-3:] for row in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["lr", "train_batch_size", "val_batch_size"], ["0.01", "4", "4"], ["0.1", "8", "8"]]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("run", "runs/simple/simple/run"),
        ("group/run", "runs/simple/group/run"),
        ("project/group/run", "runs/project/group/run"),
        ("here/project/group/run", "here/project/group/run"),
    ],
)
def test_a_run_lies_where_its_name_says(name: str, path: str) -> None:
    with make(name=name) as trainer:
        assert trainer.dream.run_dir == Path(path)
        trainer.fit()
    assert len([*Path(path, "checkpoints").glob("step_*")]) == 1


@pytest.mark.parametrize("word", ["keep", "new"])
def test_a_branch_begins_from_another_run(word: Any, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"train": samples().tensors, "optimizer": "adam", "batch_size": 4}
    parent = fit(make(name="parent", lr=0.01, **options))
    begins = dt.CheckpointParameters(resume=str(parent.dream.run_dir), branch=dt.BranchParameters(optimizer=word))
    with make(name="branch", lr=0.5, epochs=2, checkpoints=begins, **options) as branch:
        assert [row["step"] for row in branch.fit()] == [6, 12]
    assert branch.dream.optimizers[0].param_groups[0]["lr"] == (0.01 if word == "keep" else 0.5)
    assert "given_objects.lr: 0.01 -> 0.5" in caplog.text
