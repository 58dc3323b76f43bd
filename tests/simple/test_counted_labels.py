"""Labels that the loss ignores count nowhere."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import cross_entropy

import dream_trainer as dt
from tests.api import Trainer
from tests.simple.loops import CLASSES, classifier, samples
from tests.worlds import run_world

X, Y = samples(dtype=torch.float64).tensors
# Unequal shares of labels that count, in batches of any size.
COUNTS = torch.arange(len(Y)) % 7 < torch.arange(len(Y)) // 5


def trainer_of(model: nn.Module, data: Any, **options: Any) -> Trainer:
    given = {"train": data, "val": data, "batch_size": 4, "shuffle": False, "device": "cpu", "progress": False}
    return Trainer(model, **(given | options))


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [("cross_entropy", -100), (nn.CrossEntropyLoss(), -100), (nn.CrossEntropyLoss(ignore_index=7), 7)],
)
def test_an_accuracy_is_of_the_labels_that_the_loss_does_not_ignore(loss: Any, ignored: int) -> None:
    data = X, Y.where(COUNTS, ignored)
    with trainer_of(classifier(torch.float64), data, loss=loss, metrics=["accuracy"]) as trainer:
        found = trainer.fit()[-1]["val/accuracy"]
        right = trainer.predict(X).argmax(1) == Y
    assert found == pytest.approx(right[COUNTS].double().mean().item(), rel=1e-6)


class Tagger(nn.Module):
    """Scores `[batch, tokens, classes]`, and their loss, as models of Hugging Face give them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inner = nn.Embedding(9, classes)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(input_ids)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("tokens", [CLASSES, 6])
def test_the_classes_of_a_model_that_returns_its_loss_are_the_last_dimension(tokens: int) -> None:
    ids = torch.arange(24 * tokens).view(24, tokens) % 9
    labels = (ids % CLASSES).where((ids + torch.arange(24)[:, None]) % 4 > 0, -100)
    data = {"input_ids": ids, "labels": labels}
    with trainer_of(Tagger(CLASSES), data, metrics=["accuracy"]) as trainer:
        found = trainer.fit()[-1]["val/accuracy"]
        right = trainer.predict({"input_ids": ids}).argmax(-1) == labels
    assert found == pytest.approx(right[labels != -100].double().mean().item(), rel=1e-6)


def test_the_classes_of_torchs_losses_are_dimension_one() -> None:
    x = torch.randn(8, CLASSES, CLASSES, generator=torch.Generator().manual_seed(0))
    model = nn.Conv1d(CLASSES, CLASSES, 1)
    with trainer_of(model, (x, x.argmax(1)), loss=nn.CrossEntropyLoss(), metrics=["accuracy"]) as trainer:
        found = trainer.evaluate()["val/accuracy"]
        right = trainer.predict(x).argmax(1) == x.argmax(1)
    assert found == pytest.approx(right.double().mean().item(), rel=1e-6)


class Named(nn.CrossEntropyLoss):
    """As people write one to set options; it computes what torch's does."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.1)


WEIGHTS = torch.tensor([1.0, 8.0, 0.5], dtype=torch.float64)
LOSSES: dict[str, tuple[Any, Tensor]] = {
    "by name": ("cross_entropy", Y.where(COUNTS, -100)),
    "an index of its own": (nn.CrossEntropyLoss(ignore_index=7), Y.where(COUNTS, 7)),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), Y.where(COUNTS, -100)),
    "a subclass": (Named(), Y.where(COUNTS, -100)),
    "shares of classes": (nn.CrossEntropyLoss(), nn.functional.one_hot(Y, CLASSES).double()),
}


def trained(case: str, size: int, accumulate: int = 1) -> dict[str, Any]:
    loss, targets = LOSSES[case]
    model = classifier(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    limits = dt.TrainingParameters(gradient_accumulation_steps=accumulate, val_batch_size=5, train_batch_size=size)
    options = {"loss": loss, "optimizer": optimizer, "epochs": 2, "training": limits, "batch_size": None}
    with trainer_of(model, (X, targets), **options) as trainer:
        row = trainer.fit()[-1]
    return {
        "weights": [parameter.detach() for parameter in model.parameters()],
        "losses": [row["train/loss"], row["val/loss"]],
    }


def plainly(case: str, size: int = 8) -> dict[str, Any]:
    """Of big batches; the training's loss is over all labels of the last epoch."""
    loss, targets = LOSSES[case]
    function = nn.CrossEntropyLoss() if isinstance(loss, str) else loss
    model = classifier(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):
        outputs = []
        for x, y in zip(X.split(size), targets.split(size), strict=True):
            outputs.append(model(x))
            found = function(outputs[-1], y)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
    losses = [function(torch.cat(outputs), targets).item(), function(model(X), targets).item()]
    return {"weights": [parameter.detach() for parameter in model.parameters()], "losses": losses}


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-12, atol=1e-12)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_accumulated_batches_are_the_big_one_by_the_labels_that_count(case: str, accumulate: int) -> None:
    assert_close(trained(case, 8 // accumulate, accumulate), plainly(case))


def train_all(directory: str) -> dict[str, Any]:
    os.chdir(directory)
    return {case: trained(case, 4) for case in LOSSES}


def test_two_ranks_are_the_big_batch_by_the_labels_that_count(tmp_path: Path) -> None:
    for rank in run_world(train_all, 2, str(tmp_path)):
        for case, found in rank.items():
            assert_close(found, plainly(case))
