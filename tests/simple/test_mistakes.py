"""A mistake is named with what to do, in words of the arguments, and before anything is trained where it can be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn as nn
import torchmetrics
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from dream_trainer.errors import ConfigError, DataError, HookError
from dream_trainer.simple import Trainer
from dream_trainer.simple.argument_names import OF_OTHERS
from tests.simple.loops import CLASSES, WIDTH, adam, batches, classifier, make, ready, samples

X, Y = samples().tensors


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x)


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no epochs": ({"epochs": 0}, ConfigError, r"epochs=0 trains nothing. Give at least 1"),
    "no steps": ({"steps": np.int64(-1)}, ConfigError, r"steps=-1 trains nothing"),
    "a rate that is no number": ({"lr": float("nan")}, ConfigError, r"lr=nan is no learning rate"),
    "an endless rate": ({"lr": float("inf"), "optimizer": torch.optim.SGD}, ConfigError, r"lr=inf is no learning rate"),
    "a negative rate": ({"lr": -0.1}, ConfigError, r"lr=-0.1 is no learning rate. Give a number of at least 0"),
    "a rate in words": ({"lr": "0.1"}, ConfigError, r"lr='0.1' is no learning rate"),
    "an empty name": ({"name": ""}, ConfigError, r"name='' is empty. Give the run a name.*or None"),
    "two losses": ({"step": lambda m, b: m(b), "loss": cross_entropy}, ConfigError, r"loss= and step= both"),
    "metrics of a step": ({"step": lambda m, b: m(b), "metrics": ["mse"]}, ConfigError, r"metrics= with step="),
    "an unknown metric": ({"metrics": ["f1"]}, ConfigError, r"metrics has 'f1'. Of names there are accuracy"),
    "a metric without a name": ({"metrics": cross_entropy}, ConfigError, r"no name for it. Use a dict"),
    "a logger without a name": ({"loggers": ("jsonl",)}, ConfigError, r"loggers= needs a run to keep it in"),
    "a stranger's optimizer": ({"optimizer": adam(classifier())}, ConfigError, r"parameters that the model does not"),
    "two rates": ({"optimizer": dt.OptimizerParameters(), "lr": 0.1}, ConfigError, r"lr=0.1 is given twice"),
    "a schedule of a stranger": (
        {"schedule": StepLR(adam(classifier()), 1)},
        ConfigError,
        r"of an optimizer that does not train",
    ),
    "a metric of no direction": (
        {"val": ready(), "metrics": {"length": cross_entropy}, "monitor": "val/length"},
        ConfigError,
        r"monitor='val/length' does not say whether lower or higher",
    ),
    "no optimizer": ({"optimizer": lambda p: p}, ConfigError, r"made a list. Give an optimizer, its class with lr="),
    "no schedule": ({"schedule": lambda o: o}, ConfigError, r"made a AdamW. Give a schedule"),
    "no validation to follow": ({"schedule": ReduceLROnPlateau}, ConfigError, r"there is none. Give val="),
    "no target": (
        {"train": ready([X])},
        DataError,
        r"needs a target.*of float32 \[24, 5\]. Yield \(inputs, target\)",
    ),
    "no loss": (
        {"loss": None, "model": Silent()},
        HookError,
        r"Silent returned none for a batch of \[float32 \[4, 5\], int64 \[4\]\]. Give",
    ),
    "no loss of a step": ({"step": lambda m, b: {"l": 1}}, HookError, r"step returned \{'l': int\}. Return the loss"),
    "patience without validations": ({"patience": 2}, ConfigError, r"patience=2 counts validations.*Give val="),
    "monitor without validations": ({"monitor": "val/accuracy"}, ConfigError, r"monitor='val/accuracy' is.*Give val="),
    "validations of nothing": ({"val_every": 5}, ConfigError, r"val_every=5 is how often to validate.*Give val="),
    "a misspelt monitor": (
        {"val": ready(), "monitor": "val/los"},
        ConfigError,
        r"'val/los' is not among the validation's metrics. Did you mean 'val/loss'\?",
    ),
    "a monitor that a step does not give": (
        {"val": ready(), "monitor": "val/acuracy", "mode": "max", "step": lambda m, b: cross_entropy(m(b[0]), b[1])},
        ConfigError,
        r"'val/acuracy' is not among the validation's metrics. Use 'val/loss'.",
    ),
    "several validations": (
        {"val": {"clean": ready(), "noisy": ready()}, "patience": 1},
        ConfigError,
        r"'val/loss' is not among .*Use 'val/clean/loss' or 'val/noisy/loss'.",
    ),
    "several validations and a best": (
        {"val": {"clean": ready(), "noisy": ready()}, "name": "run"},
        ConfigError,
        r"Use 'val/clean/loss' or 'val/noisy/loss'.",
    ),
    "several validations to follow": (
        {"val": {"clean": ready(), "noisy": ready()}, "schedule": ReduceLROnPlateau},
        ConfigError,
        r"Use 'val/clean/loss' or 'val/noisy/loss'.",
    ),
    "a forgotten loss": (
        {"loss": None},
        HookError,
        r"Sequential.forward\(input\) cannot be called with \[float32 \[4, 5\], int64 \[4\]\].*give loss=",
    ),
    "more inputs than the model has": (
        {"train": (X, X, Y)},
        HookError,
        r"Sequential.forward\(input\) cannot be called with \[float32 \[24, 5\], float32 \[24, 5\]\] of a batch. Leave",
    ),
    "a misspelt loss": ({"loss": "crossentropy"}, ConfigError, r"loss='crossentropy' .*Did you mean 'cross_entropy'\?"),
    "a loss of its class": ({"loss": nn.CrossEntropyLoss}, ConfigError, r"is a class.*loss=CrossEntropyLoss\(\)"),
    "a loss that is none": ({"loss": 3}, ConfigError, r"loss=3 is no function. Give one of \(outputs, targets\)"),
    "a loss of one argument": ({"loss": lambda batch: 0}, ConfigError, r"loss= is called with \(outputs, targets\)"),
    "a loss with parameters": ({"loss": nn.Linear(2, 2)}, ConfigError, r"Linear with parameters of its own"),
    "a loss of each sample": (
        {"loss": nn.CrossEntropyLoss(reduction="none")},
        HookError,
        r"loss= returned float32 \[4\], not a scalar",
    ),
    "targets of another shape": (
        {"loss": "mse", "model": nn.Linear(WIDTH, 1), "train": (X, X.sum(1))},
        DataError,
        r"outputs are float32 \[24, 1\], the targets float32 \[24\]",
    ),
    "a misspelt argument": ({"epoch": 3}, ConfigError, r"no argument 'epoch'. Did you mean 'epochs'\?"),
    "an argument of others": ({"loss_fn": mse_loss}, ConfigError, r"no argument 'loss_fn'. Here it is loss="),
    "an optimizer that is none": ({"optimizer": 3}, ConfigError, r"optimizer= is of type int. Give an optimizer"),
    "parameters for an optimizer": ({"optimizer": classifier().parameters()}, ConfigError, r"of type generator"),
    "several optimizers": ({"optimizer": [adam(classifier())]}, ConfigError, r"of type list.*Several need a class"),
    "an optimizer's name": ({"optimizer": "AdamW"}, ConfigError, r"optimizer='AdamW' .*Did you mean 'adamw'\?"),
    "a schedule's name": ({"schedule": "cosin"}, ConfigError, r"schedule='cosin' .*Did you mean 'cosine'\?"),
    "a schedule that is none": ({"schedule": 3}, ConfigError, r"schedule= is of type int"),
    "a step of the batch alone": (
        {"step": lambda batch: 0},
        ConfigError,
        r"step= is called with \(model, batch\), and",
    ),
    "a callback of no arguments": ({"callbacks": [lambda: 0]}, ConfigError, r"callbacks= is called with \(trainer, e"),
    "no training data": ({"train": None}, DataError, r"train=None is no data. Give a DataLoader, a dataset"),
    "the name of data": ({"train": "data/"}, DataError, r"train='data/' is no data"),
    "the class of a dataset": ({"train": DataLoader}, DataError, r"train=<class .*DataLoader'> is no data"),
    "a list of batches": (
        {"train": batches()},
        DataError,
        r"train= is a list whose first item, \(float32 \[4, 5\], int64 \[4\]\), could be a sample or a batch. Give",
    ),
    "a list of inputs": ({"train": [*X]}, DataError, r"first item, float32 \[5\], could be a sample or a batch"),
    "a list of loaders": ({"val": [ready()]}, DataError, r"val= is a list of DataLoaders. Give them by name"),
    "arrays of two lengths": ({"train": (X, Y[:7])}, DataError, r"train= has arrays of 24, 7 samples"),
    "named arrays of two lengths": (
        {"val": {"a": {"x": X, "y": Y[:7]}}},
        DataError,
        r"val\['a'\]= has arrays of 24, 7",
    ),
    "an array and a list": (
        {"train": (X, Y.tolist())},
        DataError,
        r"tuple of Tensor, list. Make each of them an array",
    ),
    "one sample": ({"train": samples()[0]}, DataError, r"train= has an array of a single number. Give arrays of all"),
    "an array of words": ({"train": (X, np.array(["a"] * 24))}, DataError, r"an array of <U1, which no tensor"),
    "a generator of samples": ({"train": iter(samples())}, DataError, r"this is a sample and not a batch"),
    "batches of numpy": (
        {"train": ((x.numpy(), y.numpy()) for x, y in batches())},
        DataError,
        r"torch.from_numpy.*count_samples=",
    ),
    "targets that are no classes": (
        {"train": (X, Y.float())},
        DataError,
        r"numbers of classes as integers, and the targets are float32 \[24\], .*Give targets.long\(\)",
    ),
    "a tensor of another dtype": (
        {"train": (X.double(), Y)},
        DataError,
        r"inputs are float64 \[24, 5\], and .*first parameter is float32 .*Give the inputs its type",
    ),
    "whole inputs": (
        {"train": ((X * 9).to(torch.uint8), Y)},
        DataError,
        r"inputs are uint8 \[24, 5\], and .*x.to\(torch.float32\).* by 255",
    ),
    "inputs of a convolution": (
        {"train": ((X * 9)[:, None].long(), Y), "model": nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten(), classifier())},
        DataError,
        r"inputs are int64 \[24, 1, 5\], and .*Give the inputs its type, such as x.to\(torch.float32\)\.",
    ),
    "classes counted from 1": (
        {"train": (X, Y + 1)},
        DataError,
        r"the model's outputs have 3 classes, .* 0 to 2, .*the targets go from 1 to 3. Count them from 0, .* 4 classes",
    ),
    "a class below 0": (
        {"train": (X, Y - 1), "loss": nn.CrossEntropyLoss(ignore_index=7)},
        DataError,
        r"0 to 2, or 7 where .* the targets go from -1 to 1. Count them from 0",
    ),
    "targets of one column": (
        {"train": (X, Y[:, None])},
        DataError,
        r"\[24, 3\], so it takes targets \[24\], and they are int64 \[24, 1\]. Give targets.squeeze\(1\)",
    ),
    "classes of one hot": (
        {"train": (X, nn.functional.one_hot(Y, CLASSES))},
        DataError,
        r"they are int64 \[24, 3\]. Give targets.argmax\(1\)",
    ),
    "classes at the end": (
        {"train": (X[:, None].repeat(1, 4, 1), Y[:, None].repeat(1, 4))},
        DataError,
        r"\[24, 4, 3\], so it takes targets \[24, 3\], and they are int64 \[24, 4\]. .* dimension 1",
    ),
    "lists of all samples": (
        {"train": (X.tolist(), Y.tolist())},
        DataError,
        r"tuple of list, list. Make each of them an array",
    ),
    "rows of unequal lengths": (
        {"train": [([1.0, 2.0], 0), ([3.0], 1)]},
        DataError,
        r"samples of train= make no batch: each element .* of equal size.* collate=",
    ),
    "arrays of unequal lengths": (
        {"val": [(X[0], 0), (X[0, :3], 1)]},
        DataError,
        r"samples of val= make no batch: .*\[5\].*\[3\].* collate=",
    ),
    "samples of nothing": ({"train": [(X[0], None)] * 4}, DataError, r"samples of train= make no batch: .*NoneType"),
    "a sparse matrix": ({"train": (scipy.sparse.csr_matrix(X), Y)}, DataError, r"csr_matrix.*Give x.toarray\(\)"),
    "a sparse tensor": ({"train": (X.to_sparse(), Y)}, DataError, r"torch.sparse_coo.*Give x.to_dense\(\)"),
    "masked values": (
        {"train": (np.ma.masked_greater(X.numpy(), 0), Y)},
        DataError,
        r"train= has a masked array, \d+ of whose 120 values are masked. .*x.filled\(0\)",
    ),
    "the class of a model": ({"model": nn.Linear}, ConfigError, r"the model is the class Linear. Give an object"),
    "no epoch function": (
        {"callbacks": [3]},
        ConfigError,
        r"callbacks=3 is no function. Give one of \(trainer, epoch, metrics\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_what_to_do(mistake: str) -> None:
    options, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        make(**options).fit()


def test_only_the_model_has_no_name() -> None:
    with pytest.raises(ConfigError, match=r"only the model is given without a name, and 2 arguments are"):
        Trainer(classifier(), cross_entropy, train=samples())  # type: ignore[misc]


def test_names_of_other_trainers_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/simple.md").read_text()
    assert OF_OTHERS["early_stopping_patience"] == "patience"
    for name in ("loss_fn", "learning_rate", "train_dl", "num_epochs", "grad_clip", "data_collator", "train_step"):
        assert f"`{name}`" in page
        assert name in OF_OTHERS


def test_there_is_nothing_to_evaluate_without_validation_data() -> None:
    with make() as trainer, pytest.raises(ConfigError, match=r"Give val=, or evaluate\(data\)"):
        trainer.evaluate()


def missing_method(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.nope()  # type: ignore[operator,no-any-return]


WRONG_METRICS: dict[str, tuple[dict[str, Any], str]] = {
    "a mistake in a function": ({"metrics": {"mine": missing_method}}, r"no attribute 'nope'"),
    "scores of one column": (
        {"metrics": ["accuracy"], "model": nn.Linear(WIDTH, 1), "train": (X, Y[:, None].float()), "loss": "mse"},
        r'metrics=\["accuracy"\] is of scores',
    ),
    "targets of each class": (
        {"metrics": ["accuracy"], "train": (X, nn.functional.one_hot(Y, CLASSES).float())},
        r'metrics=\["accuracy"\] is of scores',
    ),
    "torchmetrics over other classes": (
        {"metrics": {"right": torchmetrics.Accuracy("multiclass", num_classes=CLASSES + 2)}},
        r"should be equal to number of classes",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_METRICS)
def test_metrics_that_do_not_fit_are_found_before_training(mistake: str, caplog: pytest.LogCaptureFixture) -> None:
    options, message = WRONG_METRICS[mistake]
    options = {"train": (X, Y), **options}
    trainer = make(val=options["train"], **options)
    with pytest.raises(Exception, match=message) as raised, trainer:
        trainer.fit()
    assert trainer.step == 0
    notes = " ".join(getattr(raised.value, "__notes__", []))
    assert "was called with outputs float32 [24, " in notes
    assert "to be written when the run is resumed" not in caplog.text


def test_an_error_after_training_has_begun_says_nothing_of_a_resume_of_what_is_not_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), make(callbacks=[fail]) as trainer:
        trainer.fit()
    assert "to be written when the run is resumed" not in caplog.text


def test_looking_at_metrics_before_training_changes_no_bit() -> None:
    found, expected = (
        nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)) for _ in range(2)
    )
    expected.load_state_dict(found.state_dict())

    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.rand(()) + outputs.mean()

    for model, options in ((found, {"metrics": {"noisy": noisy}}), (expected, {})):
        torch.manual_seed(3)
        with make(model, train=(X, Y), val=(X, Y), batch_size=4, epochs=2, **options) as trainer:
            trainer.fit()
    for one, other in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_metrics_are_tried_before_the_first_training_alone() -> None:
    tried: list[int] = []

    def counted(outputs: Tensor, targets: Tensor) -> Tensor:
        tried.append(len(outputs))
        return outputs.mean()

    with make(val=(X, Y), metrics={"counted": counted}, epochs=1) as trainer:
        for epochs in (1, 2, 3):
            trainer.train_epoch() if epochs == 2 else trainer.fit(epochs=epochs)
            assert len(tried) == 1 + epochs


def test_a_generator_is_not_used_up_before_training() -> None:
    with make(val=iter(batches()), metrics=["accuracy"]) as trainer:
        assert "val/accuracy" in trainer.fit()[-1]


def test_metrics_without_validations_are_said_to_be_of_none(caplog: pytest.LogCaptureFixture) -> None:
    with make(metrics=["accuracy"]) as trainer:
        trainer.fit()
        assert "metrics= are of validations, and there are none" in caplog.text
        assert "val/accuracy" in trainer.evaluate((X, Y))


def test_an_error_of_torch_tells_of_the_batch() -> None:
    with pytest.raises(RuntimeError) as raised:
        make(train=(X[:, 1:], Y)).fit()
    (found,) = raised.value.__notes__
    assert re.search(r"float32 \[24, 4\].*first parameter is float32 \[5, 5\]", found), found


def test_rows_to_predict_have_one_length() -> None:
    with make() as trainer, pytest.raises(DataError, match=r"rows of 2, 3 numbers. Give rows of one length"):
        trainer.predict([[1.0, 2.0], [1.0, 2.0, 3.0]])


def test_an_array_that_masks_nothing_is_an_array() -> None:
    model, expected = classifier(), classifier()
    for one, x in ((model, np.ma.masked_array(X.numpy())), (expected, X)):
        with make(one, train=(x, Y), batch_size=4) as trainer:
            trainer.fit()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_predictions_of_half_precision_are_float32_which_numpy_has(dtype: torch.dtype) -> None:
    model = nn.Linear(WIDTH, CLASSES).to(dtype)
    expected = model(X.to(dtype)).float()
    with make(model, train=(X.to(dtype), Y)) as trainer:
        found = trainer.predict(X.to(dtype))
        assert (found.dtype, found.shape) == (torch.float32, expected.shape)
        assert torch.equal(found, expected)
        assert found.numpy().dtype == np.float32


class LMHeadModel(nn.Module):
    """Shifts its labels inside, as causal models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(9, 9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids)
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class TinyForCausalLM(LMHeadModel):
    pass


@pytest.mark.parametrize("kind", [LMHeadModel, TinyForCausalLM])
def test_an_accuracy_of_a_model_that_shifts_its_labels_is_refused_by_name(kind: type[nn.Module]) -> None:
    ids = torch.randint(9, (8, 4))
    data = {"input_ids": ids, "labels": ids}
    with pytest.raises(ConfigError, match=rf"of {kind.__name__}, .*shifts its labels.*outputs\[:, :-1\]"):
        Trainer(kind(), train=data, val=data, metrics=["accuracy"])
    own = {"accuracy": lambda outputs, targets: (outputs[:, :-1].argmax(-1) == targets[:, 1:]).float().mean()}
    with Trainer(kind(), train=data, val=data, metrics=own, device="cpu", progress=False) as trainer:
        assert "val/accuracy" in trainer.fit()[-1]


def test_a_loss_goes_by_name() -> None:
    named, given = make(loss="cross_entropy", lr=0.1), make(lr=0.1)
    with named, given:
        assert named.fit()[0]["train/loss"] == given.fit()[0]["train/loss"]


@pytest.mark.parametrize("metric", ["accuracy", "mse", "mae"])
def test_metrics_of_one_column_and_none_are_refused(metric: str) -> None:
    data = TensorDataset(torch.randn(8, 5), torch.ones(8))
    model = nn.Linear(5, 1)
    loss = lambda outputs, targets: (outputs[:, 0] - targets).square().mean()  # noqa: E731
    with (
        Trainer(model, loss=loss, train=data, val=data, metrics=[metric], device="cpu", progress=False) as trainer,
        pytest.raises((ConfigError, DataError), match=metric),
    ):
        trainer.fit()


@pytest.mark.parametrize("loss", [nn.PoissonNLLLoss(), nn.KLDivLoss(reduction="batchmean"), nn.HingeEmbeddingLoss()])
def test_losses_that_would_repeat_targets_are_refused(loss: nn.Module) -> None:
    data = TensorDataset(torch.randn(8, 5), torch.ones(8))
    with (
        Trainer(nn.Linear(5, 1), loss=loss, train=data, device="cpu", progress=False) as trainer,
        pytest.raises(DataError, match="element by element"),
    ):
        trainer.fit()


def test_numpys_own_type_becomes_the_models_and_a_tensors_stays() -> None:
    x, y = X.double().numpy(), Y.numpy().astype("int32")
    found, expected = classifier(), classifier()
    with make(found, train=(x, y), val=(x, y), metrics=["accuracy"], batch_size=4) as trainer:
        trainer.fit()
        assert trainer.predict(x).dtype is torch.float32
        assert torch.equal(trainer.predict(x.tolist()), trainer.predict(x))
        assert torch.equal(trainer.predict([*x]), trainer.predict(x))
        with pytest.raises(DataError, match=r"got \[5\], which is one of those trained with .*Give x\[None\]"):
            trainer.predict(x[0])
        assert trainer.predict(x[0][None]).shape == (1, CLASSES)
    with make(expected, train=(X, Y), batch_size=4) as trainer:
        trainer.fit()
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    double = classifier(torch.float64)
    with make(double, train=(x, y)) as trainer:
        trainer.fit()


@pytest.mark.parametrize("loss", ["binary_cross_entropy_with_logits", nn.BCEWithLogitsLoss(), "mse", nn.HuberLoss()])
def test_whole_targets_are_compared_element_by_element_as_the_outputs_type(loss: Any) -> None:
    model, expected = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
    expected.load_state_dict(model.state_dict())
    y = (Y > 0)[:, None]
    for one, targets in ((model, y), (expected, y.float())):
        with make(one, loss=loss, train=(X, targets), batch_size=4) as trainer:
            trainer.fit()
    assert torch.equal(model.weight, expected.weight)
    with pytest.raises(
        DataError, match=r"outputs are float32 \[24, 1\], the targets float32 \[24\]. .*targets\[:, None\]"
    ):
        make(model, loss=loss, train=(X, y[:, 0].float())).fit()


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss()])
def test_shares_of_each_class_are_targets_of_a_cross_entropy(loss: Any) -> None:
    model, expected = classifier(), classifier()
    for one, targets in ((model, nn.functional.one_hot(Y, CLASSES).float()), (expected, Y)):
        with make(one, loss=loss, train=(X, targets), batch_size=4) as trainer:
            trainer.fit()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(next(model.parameters()), next(classifier().parameters()))


def test_a_step_of_ones_own_sees_the_arrays_as_they_are() -> None:
    seen: list[torch.dtype] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0].dtype)
        return cross_entropy(model(batch[0].float()), batch[1])

    make(step=step, train=(X.double().numpy(), Y.numpy())).fit()
    assert set(seen) == {torch.float64}
