"""A run with a name says what it was made of, in its record and where it is found again."""

from __future__ import annotations

import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dream_trainer as dt
from dream_trainer.cli.main import main
from dream_trainer.config.config_files import load_config
from dream_trainer.config.dream_trainer_config import DreamTrainerConfig
from dream_trainer.errors import CheckpointError
from dream_trainer.simple.given_record import in_arguments
from dream_trainer.simple.given_values import options_of, values_digest
from tests.simple.loops import classifier, make, samples
from tests.trainer.small import ROOT


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_name_that_was_there_tells_whose_history_it_is_and_what_was_given_otherwise(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    inputs, targets = samples().tensors
    options: dict[str, Any] = {"name": "run", "optimizer": "adam", "lr": 0.01, "batch_size": 4}
    with make(train=(inputs, targets), **options) as first:
        first.fit()
    options["lr"] = 0.5
    longer = nn.Sequential(classifier(), nn.Linear(3, 3))
    with (
        make(longer, train=(inputs, targets), **options) as other,
        pytest.raises(CheckpointError, match="given_objects.model: 'Seq"),
    ):
        other.fit()
    caplog.clear()
    with make(train=(inputs[:20], targets[:20]), loss="nll", progress=False, **options) as again:
        assert again.fit() == first.history
    text = " ".join(caplog.text.split())
    assert "nothing to train: 1 epochs and 6 steps are done. The run 'run' was there already, in runs/simple" in text
    assert "loss= 'cross_entropy' -> 'nll'" in text
    assert f"train= '(float32 {[*inputs.shape]}, int64 [24])' -> '(float32 {[20, *inputs.shape[1:]]}" in text
    assert "lr= 0.01 -> 0.5" in text
    assert "Give another name= to train from the start" in text
    assert "experiment" not in text
    assert "this config has lr=0.5" in text
    assert capsys.readouterr().out == ""
    with make(train=(inputs, targets), progress=True, **options | {"lr": 0.01}) as same:
        same.fit()
    printed = capsys.readouterr().out
    assert "The run 'run' was there already" in printed
    assert "otherwise" not in printed


def test_what_was_given_is_in_the_record_of_the_run_and_tells_runs_apart(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = samples().tensors
    for name, lr, size in (("a", 0.01, 4), ("b", 0.1, 8)):
        with make(
            train=(x, y), val=(x, y), metrics=["accuracy"], optimizer=torch.optim.SGD, lr=lr, schedule="cosine",
            batch_size=size, name=name,
        ) as trainer:  # fmt: skip
            trainer.fit()
    config = json.loads(Path("runs/simple/simple/b/config.json").read_text())
    given = config["given_objects"]
    assert given["model"].startswith(f"{type(classifier()).__name__} of ")
    assert (given["loss"], given["lr"], given["schedule"], given["metrics"]) == (
        "cross_entropy",
        0.1,
        "cosine",
        ["accuracy"],
    )
    assert given["optimizer"]["name"] == "SGD"
    assert given["optimizer"]["momentum"] == 0
    assert config["training_parameters"]["train_batch_size"] == 8
    assert main(["runs", "runs"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-3:] == ["train_batch_size", "val_batch_size", "lr"]
    assert main(["runs", "runs", "--columns", "lr"]) == 0
    assert "0.01" in capsys.readouterr().out
    (command,) = re.findall(r"`dream-trainer (runs --columns \S+)`", (ROOT / "docs/simple.md").read_text())
    assert main(command.split()) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["lr", "schedule", "train_batch_size"]
    assert [row.split()[-3:] for row in rows] == [["0.01", "cosine", "4"], ["0.1", "cosine", "8"]]
    assert main(["runs", "--columns", "branch.schedule,checkpoint_parameters.branch.optimizer"]) == 0
    assert [row.split()[-2:] for row in capsys.readouterr().out.splitlines()[2:]] == [["keep", "keep"]] * 2
    with make(train=DataLoader(samples(), 6), name="c") as trainer:
        trainer.fit()
    assert (
        json.loads(Path("runs/simple/simple/c/config.json").read_text())["training_parameters"]["train_batch_size"] == 6
    )
    loaded = load_config(DreamTrainerConfig, "runs/simple/simple/c", project="p", group="g", experiment="e")
    assert loaded.training_parameters.train_batch_size == 6


@pytest.mark.parametrize("word", ["keep", "moments", "new"])
def test_a_branch_says_what_it_is_given_otherwise_and_which_numbers_hold(
    word: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = samples().tensors
    options: dict[str, Any] = {"train": data, "optimizer": "adam", "batch_size": 4}
    with make(name="parent", lr=0.01, **options) as parent:
        parent.fit()
    begins = dt.CheckpointParameters(resume=str(parent.dream.run_dir), branch=dt.BranchParameters(optimizer=word))
    caplog.clear()
    with make(name="branch", lr=0.5, epochs=1, checkpoints=begins, **options) as branch:
        branch.fit()
    text = " ".join(caplog.text.split())
    told = "the run 'branch' begins from step 6 of simple/simple/parent, which had other arguments: "
    assert f"{told}lr= 0.01 -> 0.5. What is given now counts{', but for the o' if word == 'keep' else '.'}" in text
    assert ("numbers, which go along" in text) == (word == "keep")
    assert branch.dream.optimizers[0].param_groups[0]["lr"] == (0.01 if word == "keep" else 0.5)
    assert "6 steps are done. The run 'branch' begins from step 6 of simple/simple/parent: the weights" in text
    assert "already" not in text
    caplog.clear()
    with make(name="branch", lr=0.5, epochs=2, checkpoints=begins, **options) as branch:
        branch.fit()
    with make(name="branch", lr=0.7, epochs=2, checkpoints=begins, **options) as branch:
        branch.fit()
    text = " ".join(caplog.text.split())
    assert "the run 'branch', which goes on from step 12, was begun with other arguments: lr= 0.5 -> 0.7." in text
    assert "The run 'branch' was there already" in text


def test_fields_that_an_older_version_did_not_have_are_no_other_arguments() -> None:
    changed = [
        "device_parameters.context_parallel: (absent) -> 1",
        "given_objects.loss_options: (absent) -> ''",
        "callbacks.EMA: (absent) -> 0.9",
        "training_parameters.gradient_clip_val: None -> 1.0",
    ]
    assert in_arguments(changed) == ["callbacks.EMA: (absent) -> 0.9", "clip= None -> 1.0"]


def cross(**options: Any) -> nn.Module:
    return nn.CrossEntropyLoss(**options)


def flipped(data: Any) -> Any:
    return data[0], 2 - data[1]


def other_row(data: Any) -> Any:
    inputs = data[0].clone()
    inputs[-1] += 1
    return inputs, data[1]


def test_how_long_runs_trained_is_told_before_what_their_data_are(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = samples().tensors
    for name, count, loss in (("a", 12, cross()), ("b", 24, cross(label_smoothing=0.1))):
        options: dict[str, Any] = {"train": (x[:count], y[:count]), "val": (x[:count], y[:count]), "lr": 0.1 / count}
        with make(loss=loss, epochs=count // 12, metrics=["accuracy"][count // 24 :], name=name, **options) as trainer:
            trainer.fit()
    assert main(["runs", "runs"]) == 0
    assert re.search(r"  n_epochs  .*lr  ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": flipped}, "train= has other values, of the same shapes"),
        ({"train": other_row}, "train= has other values, of the same shapes"),
        ({"val": flipped}, "val= has other values, of the same shapes"),
        ({"train": lambda data: dict(zip("xy", flipped(data), strict=True))}, "train= "),
        ({"train": lambda data: DataLoader(TensorDataset(*flipped(data)), 4)}, "train= has other values"),
        ({"train": lambda data: [(x, int(y)) for x, y in zip(*flipped(data), strict=True)]}, "train= "),
        ({"loss": cross(label_smoothing=0.1)}, "label_smoothing=0.1"),
        ({"loss": cross(weight=torch.tensor([1.0, 2.0, 3.0]))}, "weight='"),
        ({}, None),
    ],
)
def test_values_and_options_that_are_given_otherwise_are_seen(
    changes: dict[str, Any], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    data = samples().tensors
    options: dict[str, Any] = {"train": data, "val": data, "loss": cross(), "batch_size": 4, "name": "run"}
    with make(**options) as first:
        first.fit()
    for name, change in changes.items():
        options[name] = change(data) if name != "loss" else change
    if isinstance(options["train"], dict):
        options |= {"target": "y"}
    caplog.clear()
    with make(epochs=1, **options) as again:
        again.fit()
    assert (said is None and "otherwise" not in caplog.text) or (said is not None and said in caplog.text)


def test_a_digest_of_values_reads_a_bounded_sample_and_sees_what_is_flipped() -> None:
    large = torch.zeros(4_000_000)
    before, after = (values_digest(TensorDataset(values)) for values in (large, large + 1))
    assert before != after
    assert before == values_digest(TensorDataset(large.clone()))
    items = [(row, 1) for row in torch.zeros(1000, 2)]
    assert values_digest(items) != values_digest([(row, 0) for row, _ in items])
    assert options_of(partial(cross_entropy, label_smoothing=0.1)) == "label_smoothing=0.1"


class Unread(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nobody asked for a sample")

    def __len__(self) -> int:
        return 8


def test_a_dataset_with_code_of_its_own_is_not_read_for_a_digest() -> None:
    assert values_digest(DataLoader(Unread(), 4)) is None


def test_integers_of_numpy_are_integers() -> None:
    two = np.int64(2)
    counts: dict[str, Any] = {"epochs": two, "steps": np.int32(9), "batch_size": two, "accumulate": two}
    x, y = samples(8).tensors
    data = {"train": (x, y), "val": (x, y)}
    with make(**data, **counts, patience=two, val_every=two, val_batch_size=two, seed=two, name="numpys") as trainer:
        trainer.fit()
        assert (trainer.epoch, trainer.step) == (2, 4)
        trainer.fit(epochs=np.int64(3))
        assert trainer.step == 6
        trainer.evaluate((x, y), batch_size=two)
