"""The same script under torchrun: on two ranks the weights, metrics and rows of one process, in float64."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import Trainer
from tests.simple.loops import SAMPLES, adam, batches, classifier, plain_loop, samples
from tests.trainer.arithmetic import full
from tests.worlds import run_world

CASES = ("replicas", "shards", "arrays", "stopped and resumed")
SHORT = ("uneven", "accumulated")


def train(directory: str, case: str) -> dict[str, Any]:
    os.chdir(directory)
    data, val = samples(23 if case in SHORT else SAMPLES, torch.float64), samples(7, dtype=torch.float64)
    name = "run" if case == "stopped and resumed" else None
    training = dt.TrainingParameters(n_epochs=2, gradient_clip_norm=0.1, train_batch_size=4, val_batch_size=2)
    if case == "accumulated":
        training = replace(training, gradient_accumulation_steps=2, train_batch_size=2)
    for limits in ({"steps": 4}, {"epochs": 2}) if name else ({},):
        model = classifier(torch.float64)
        if int(os.environ["RANK"]) == 1:
            torch.nn.init.zeros_(model[1].weight)  # the first rank's weights count
        trainer = Trainer(
            model,
            loss=cross_entropy,
            optimizer=adam(model),
            train=data.tensors if case in ("arrays", *SHORT) else DataLoader(data, 4),
            shuffle=False,
            val=val,
            metrics=["accuracy"],
            training=training,
            device=dt.DeviceParameters(device="cpu") if case == "shards" else "cpu",
            name=name,
            checkpoints=dt.CheckpointParameters() if name else None,
            progress=False,
        )
        history = trainer.fit(**limits)
        found = {
            "weights": [full(p).detach() for p in model.parameters()],
            "history": [{key: value for key, value in row.items() if key != "seconds"} for row in history],
            "seconds": [row["seconds"] for row in history],
            "predictions": trainer.predict(val),
            "is": (trainer.is_main, trainer.is_distributed),
            "differs": "state of ranks" in trainer.dream._runtime.said_once,
        }
        trainer.close()
    return found | {"files": sorted(os.listdir(directory))}


def average(directory: str) -> dict[str, Any]:
    """Shards whose average is validated: the best of it is loaded, and what is validated then is saved."""
    os.chdir(directory)
    model, (x, y) = classifier(torch.float64), samples(7, dtype=torch.float64).tensors
    model[1].requires_grad_(False)
    options: dict[str, Any] = {"optimizer": "sgd", "lr": 3.0, "batch_size": 4, "epochs": 4, "callbacks": [dt.EMA(0.5)]}
    options["checkpoints"] = dt.CheckpointParameters(save_frozen=False, best_metric="val/loss", save_on_best=True)
    options |= {"name": "averaged", "device": dt.DeviceParameters(device="cpu"), "progress": False}
    data = samples(dtype=torch.float64).tensors
    trainer = Trainer(model, loss=cross_entropy, train=data, val=(x, y), **options)
    history = trainer.fit()
    trainer.load_best()
    trainer.save("best.pt")
    found = {
        "best": trainer.evaluate()["val/loss"],
        "losses": [row["val/loss"] for row in history],
        "weights": [full(p).detach() for p in model.parameters()],
    }
    trainer.close()
    saved = torch.load("best.pt", weights_only=True)
    found["are_saved"] = all(map(torch.equal, saved.values(), found["weights"]))
    return found


def train_all(directory: str, for_unnamed: str) -> dict[str, Any]:
    tempfile.tempdir = for_unnamed  # of this world alone
    found = {case: train(directory, case) for case in (*CASES, *SHORT)}
    return found | {"averaged": average(directory)}


@pytest.fixture(scope="module")
def for_unnamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unnamed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, for_unnamed: Path) -> list[dict[str, Any]]:
    return run_world(train_all, 2, str(tmp_path_factory.mktemp("two")), str(for_unnamed))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_the_plain_loop_over_batches_of_both(ranks: list[dict[str, Any]], case: str) -> None:
    expected = classifier(torch.float64)
    means = plain_loop(expected, adam(expected), batches(8, torch.float64), epochs=2, clip=0.1)
    x, y = samples(7, dtype=torch.float64).tensors
    outputs = expected(x).detach()
    for number, rank in enumerate(ranks):
        found = rank[case]
        for one, other in zip(found["weights"], expected.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)
        assert [row["train/loss"] for row in found["history"]] == pytest.approx(means, rel=1e-12)
        assert [row["step"] for row in found["history"]] == [3, 6]
        assert found["history"][-1]["val/loss"] == pytest.approx(cross_entropy(outputs, y).item(), rel=1e-12)
        assert found["history"][-1]["val/accuracy"] == pytest.approx((outputs.argmax(1) == y).double().mean().item())
        torch.testing.assert_close(found["predictions"], outputs, rtol=1e-12, atol=1e-12)
        assert found["is"] == (number == 0, True)
        assert found["files"] == (["runs"] if case == CASES[-1] else [])
        assert found["history"] == ranks[0][case]["history"]
        assert found["seconds"] == ranks[0][case]["seconds"]
        assert not found["differs"]


@pytest.mark.parametrize("case", SHORT)
def test_at_an_uneven_end_each_sample_counts_the_same(ranks: list[dict[str, Any]], case: str) -> None:
    expected = classifier(torch.float64)
    x, y = samples(23, torch.float64).tensors  # windows of 8, 8 and 7 samples
    batches_of_both = list(zip(x.split(8), y.split(8), strict=True))
    plain_loop(expected, adam(expected), batches_of_both, epochs=2, clip=0.1)
    for rank in ranks:
        for one, other in zip(rank[case]["weights"], expected.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)


def test_the_best_average_of_shards_is_loaded_validated_and_saved(ranks: list[dict[str, Any]]) -> None:
    case = "averaged"
    x, y = samples(7, dtype=torch.float64).tensors
    expected = classifier(torch.float64)
    with torch.no_grad():
        for parameter, weight in zip(expected.parameters(), ranks[0][case]["weights"], strict=True):
            parameter.copy_(weight)
        loss = cross_entropy(expected(x), y).item()
    for rank in ranks:
        losses = rank[case]["losses"]
        assert min(losses) < losses[-1]
        assert rank[case]["are_saved"]
        assert rank[case]["best"] == pytest.approx(min(losses), rel=1e-12) == pytest.approx(loss, rel=1e-12)


def test_nothing_of_unnamed_runs_is_left(ranks: list[dict[str, Any]], for_unnamed: Path) -> None:
    assert len(ranks) == 2
    assert [*for_unnamed.iterdir()] == []
