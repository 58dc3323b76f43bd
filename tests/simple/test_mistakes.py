"""A mistake raises an error that says what to do, in words of the arguments; values that are converted stay exact."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torchmetrics
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import dream_trainer as dt
from tests.api import ConfigError, DataError, HookError
from tests.simple.loops import CLASSES, WIDTH, adam, assert_same_bits, batches, classifier, make, ready, samples

X, Y = samples().tensors


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no rate": ({"lr": float("nan")}, ConfigError, "lr=nan"),
    "two losses": ({"step": loss_of, "loss": cross_entropy}, ConfigError, r"loss= and step= both"),
    "metrics of a step": ({"step": loss_of, "metrics": ["mse"]}, ConfigError, r"metrics= need loss="),
    "an unknown metric": ({"metrics": ["f1"]}, ConfigError, r"metrics='f1' is not known. Use 'accuracy'"),
    "a metric without a name": ({"metrics": cross_entropy}, ConfigError, r"metrics=<function.*not a tuple of strings"),
    "loggers without a name": ({"loggers": dt.LoggerParameters()}, ConfigError, r"are of a named run"),
    "a stranger's optimizer": ({"optimizer": adam(classifier())}, HookError, r"belongs to no model"),
    "two rates": ({"optimizer": dt.OptimizerParameters(), "lr": 0.1}, ConfigError, r"lr=0.1 is given twice"),
    "a schedule of a stranger": ({"schedule": StepLR(adam(classifier()), 1)}, ConfigError, r"not a schedule of optim"),
    "no schedule": ({"schedule": lambda o: o}, ConfigError, r"not a schedule of optimizer="),
    "a metric of no direction": (
        {"val": ready(), "metrics": {"length": cross_entropy}, "monitor": "val/length"},
        ConfigError,
        r"monitor='val/length' does not say whether lower or higher",
    ),
    "a misspelt monitor": (
        {"val": ready(), "monitor": "val/los", "name": "run"},
        ConfigError,
        r"'val/los'.*'val/loss'",
    ),
    "a monitor without validations": ({"monitor": "val/accuracy"}, ConfigError, r"monitor='val/accuracy'.*Give val="),
    "no validation to follow": ({"schedule": ReduceLROnPlateau}, ConfigError, r"Give val="),
    "a plateau of the other direction": (
        {"schedule": ReduceLROnPlateau, "val": ready(), "metrics": ["accuracy"], "monitor": "val/accuracy"},
        ConfigError,
        r"better by 'max'. .*ReduceLROnPlateau\(mode='max'\)",
    ),
    "no target": ({"train": ready([X])}, DataError, r"needs a target.*float32 \[24, 5\].*\(inputs, target\)"),
    "no loss": ({"loss": None, "model": Silent()}, HookError, r"Silent returned none for a batch of .*int64 \[4\]"),
    "no loss of a step": ({"step": lambda m, b: {"l": 1}}, HookError, r"step returned \{'l': 1\}. Return the loss"),
    "a misspelt loss": (
        {"loss": "crossentropy"},
        ConfigError,
        r"loss='crossentropy' is not known. Use 'cross_entropy'",
    ),
    "a loss with parameters": ({"loss": nn.Linear(2, 2)}, ConfigError, r"loss=Linear has parameters"),
    "a loss of each sample": ({"loss": nn.CrossEntropyLoss(reduction="none")}, HookError, r"not a scalar"),
    "several optimizers": (
        {"optimizer": [adam(classifier())]},
        ConfigError,
        r"optimizer= is one. Several need a class",
    ),
    "an unknown optimizer": ({"optimizer": "AdamW"}, ConfigError, r"name='AdamW' is not known"),
    "an unknown schedule": ({"schedule": "cosin"}, ConfigError, r"name='cosin' is not known"),
    "no training data": ({"train": None}, DataError, r"train=None is no data. Give a DataLoader, a dataset"),
    "the name of data": ({"train": "data/"}, DataError, r"train='data/' is no data"),
    "a list of batches": ({"train": batches()}, DataError, r"train= is a list whose first item, .*or a batch. Give"),
    "a list of loaders": ({"val": [ready()]}, DataError, r"a dict of several named data"),
    "arrays of two lengths": ({"train": (X, Y[:7])}, DataError, r"int64 \[7\]'\]. Make each.*of one first dimension"),
    "named arrays of two lengths": ({"val": {"a": {"x": X, "y": Y[:7]}}}, DataError, r"val\['a'\]= has "),
    "an array and a list": ({"train": (X, Y.tolist())}, DataError, r"train= has .*'list'>\]. Make"),
    "one sample": ({"train": samples()[0]}, DataError, r"Make each of them an array of all samples"),
    "a generator of samples": ({"train": iter(samples())}, DataError, r"batches instead of samples"),
    "classes counted from 1": (
        {"train": (X, Y + 1)},
        DataError,
        r"from 1 to 3, and .* 3 classes. Count targets from 0",
    ),
    "a class below 0": (
        {"train": (X, Y - 1), "loss": nn.CrossEntropyLoss(ignore_index=7)},
        DataError,
        r"from -1 to 1.* use 7 for those",
    ),
    "the class of a model": ({"model": nn.Linear}, ConfigError, r"the model is a type. Give an object"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_what_to_do(mistake: str) -> None:
    options, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        make(**options).fit()


def test_there_is_nothing_to_evaluate_without_validation_data() -> None:
    with make() as trainer, pytest.raises(HookError, match=r"Pass evaluate\(dataloader\)"):
        trainer.evaluate()


def missing_method(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.nope()  # type: ignore[operator,no-any-return]


COLUMN: dict[str, Any] = {"model": nn.Linear(WIDTH, 1), "loss": lambda outputs, targets: outputs.mean()}
WRONG_METRICS: dict[str, tuple[dict[str, Any], str]] = {
    "a mistake in a function": ({"metrics": {"mine": missing_method}}, r"no attribute 'nope'"),
    "scores of one column": ({"metrics": ["accuracy"], **COLUMN}, r'metrics=\["accuracy"\] needs scores'),
    "an error of one column and none": ({"metrics": ["mse"], **COLUMN}, r"element by element"),
    "torchmetrics over other classes": (
        {"metrics": {"right": torchmetrics.Accuracy("multiclass", num_classes=CLASSES + 2)}},
        r"should be equal to number of classes",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_METRICS)
def test_metrics_that_do_not_fit_are_found_before_training(mistake: str) -> None:
    options, message = WRONG_METRICS[mistake]
    trainer = make(train=(X, Y), val=(X, Y), **options)
    with pytest.raises(Exception, match=message), trainer:
        trainer.fit()
    assert trainer.step == 0


def fail(*_: Any) -> None:
    raise RuntimeError("mine")


def test_an_error_after_training_saves_nothing_of_a_run_without_a_name() -> None:
    with pytest.raises(RuntimeError, match="mine"), make(callbacks=[fail]) as trainer:
        trainer.fit()
    assert trainer.dream.checkpoints() == []


def test_looking_at_metrics_before_the_first_training_changes_no_bit() -> None:
    found, expected = (
        nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)) for _ in range(2)
    )
    expected.load_state_dict(found.state_dict())
    tried: list[int] = []

    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        tried.append(len(outputs))
        return torch.rand(()) + outputs.mean()

    for model, options in ((found, {"metrics": {"noisy": noisy}}), (expected, {})):
        torch.manual_seed(3)
        with make(model, train=(X, Y), val=(X, Y), batch_size=24, epochs=2, **options) as trainer:
            trainer.fit()
            trainer.train_epoch()
    assert tried == [24] * 4
    assert_same_bits(found, expected)


def test_predictions_of_half_precision_are_float32_which_numpy_has() -> None:
    model, x = nn.Linear(WIDTH, CLASSES).to(torch.bfloat16), X.to(torch.bfloat16)
    with make(model, train=(x, Y)) as trainer:
        found = trainer.predict(x)
    assert found.dtype is torch.float32
    assert torch.equal(found, model(x).float())


def assert_same_training(found: dict[str, Any], expected: dict[str, Any], model: Any = classifier) -> None:
    """Both train to the same bits."""
    models = []
    for options in (found, expected):
        torch.manual_seed(0)
        models.append(model())
        with make(models[-1], batch_size=4, **options) as trainer:
            trainer.fit()
    assert_same_bits(*models)


FLOATS = {"train": (X, Y)}
CONVERTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a loss by name": ({"loss": "cross_entropy", **FLOATS}, FLOATS),
    "float64 and int32 of numpy": ({"train": (X.double().numpy(), Y.numpy().astype("int32"))}, FLOATS),
    "an array that masks nothing": ({"train": (np.ma.masked_array(X.numpy()), Y)}, FLOATS),
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_types_are_converted_to_those_that_train(kind: str) -> None:
    assert_same_training(*CONVERTED[kind])


@pytest.mark.parametrize("loss", ["binary_cross_entropy_with_logits", nn.BCEWithLogitsLoss(), "mse", nn.HuberLoss()])
def test_whole_targets_are_compared_element_by_element_as_the_outputs_type(loss: Any) -> None:
    whole = (Y > 0)[:, None]
    options = [{"loss": loss, "train": (X, targets)} for targets in (whole, whole.float())]
    assert_same_training(*options, lambda: nn.Linear(WIDTH, 1))
    with pytest.raises(DataError, match=r"\[24, 1\] and the targets torch.float32 \[24\]. .*targets\[:, None\]"):
        make(nn.Linear(WIDTH, 1), loss=loss, train=(X, whole[:, 0].float())).fit()


@pytest.mark.parametrize("loss", [nn.PoissonNLLLoss(), nn.KLDivLoss(reduction="batchmean"), nn.HingeEmbeddingLoss()])
def test_losses_that_would_repeat_targets_are_refused(loss: nn.Module) -> None:
    with pytest.raises(DataError, match="element by element"):
        make(nn.Linear(WIDTH, 1), loss=loss, train=(X, torch.ones(24))).fit()


def test_a_step_of_ones_own_sees_the_arrays_as_they_are() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        assert batch[0].dtype is torch.float64
        return cross_entropy(model(batch[0].float()), batch[1])

    make(step=step, train=(X.double().numpy(), Y.numpy())).fit()
