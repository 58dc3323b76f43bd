"""A trainer from objects trains as the plain loop over the same objects: to the bit on one process."""

import gc
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dream_trainer as dt
from tests.api import DataError, DistributedDataLoader, Mixture, Trainer
from tests.simple import loops
from tests.trainer.small import fit


def test_objects_are_trained_as_by_the_plain_loop_bit_for_bit() -> None:
    model, expected = loops.classifier(), loops.classifier()
    optimizer, by_hand = loops.adam(model), loops.adam(expected)
    training = dt.TrainingParameters(gradient_accumulation_steps=2, gradient_clip_norm=100.0)
    options: dict[str, Any] = {"schedule": StepLR(optimizer, 1, 0.5), "schedule_unit": "epoch", "training": training}
    trainer = loops.make(model, optimizer=optimizer, epochs=3, **options)
    history = trainer.fit()
    schedule = StepLR(by_hand, 1, 0.5)
    means = loops.plain_loop(expected, by_hand, loops.batches(), epochs=3, schedule=schedule, accumulate=2, clip=100.0)
    loops.assert_same_bits(model, expected)
    assert trainer.model is model
    assert trainer.dream.optimizers == [optimizer]
    assert [row["train/loss"] for row in history] == pytest.approx(means, rel=1e-12)
    assert [(row["epoch"], row["step"], row["lr"]) for row in history] == [
        (0, 3, 0.005),
        (1, 6, 0.0025),
        (2, 9, 0.00125),
    ]
    trainer.close()


@pytest.mark.parametrize("is_frozen_part", [False, True])
def test_a_model_given_in_eval_mode_trains_with_dropout_and_parts_keep_their_mode(is_frozen_part: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), loops.classifier(), nn.Dropout(0.5))
    (model[2] if is_frozen_part else model).eval()
    modes: list[tuple[bool, bool]] = []
    model.register_forward_pre_hook(lambda *_: modes.append((model[0].training, model[2].training)))
    loops.make(model).fit()
    assert set(modes) == {(True, not is_frozen_part)}


def assert_trains_as_the_plain_loop(model: nn.Module, **options: Any) -> None:
    expected = loops.classifier()
    fit(loops.make(model, **{"optimizer": loops.adam(model), "epochs": 2} | options))
    loops.plain_loop(expected, loops.adam(expected), loops.batches(), epochs=2)
    loops.assert_same_bits(model, expected)


def test_gradients_from_before_are_not_part_of_the_first_step() -> None:
    model = loops.classifier()
    cross_entropy(model(loops.batches()[0][0]), loops.batches()[0][1]).backward()
    assert_trains_as_the_plain_loop(model)


@pytest.mark.parametrize("form", ["loader", "batches"])
def test_each_sample_of_a_window_counts_the_same_in_a_short_batch_too(form: str) -> None:
    """21 samples in batches of 4, three for a step: windows of 4 + 4 + 4 and of 4 + 4 + 1 samples."""
    x, y = loops.samples(21, torch.float64).tensors
    parts = list(zip(x.split(4), y.split(4), strict=True))
    found, expected = loops.classifier(torch.float64), loops.classifier(torch.float64)
    data = DataLoader(TensorDataset(x, y), 4) if form == "loader" else (lambda: iter(parts))
    training = dt.TrainingParameters(gradient_accumulation_steps=3, gradient_clip_norm=0.1)
    with loops.make(found, optimizer=loops.adam(found), train=data, epochs=2, training=training) as trainer:
        history = trainer.fit()
    windows = list(zip(x.split(12), y.split(12), strict=True))  # a step of 12 samples, and one of 9
    loops.plain_loop(expected, loops.adam(expected), windows, epochs=2, clip=0.1)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert history[-1]["step"] == 4


def test_in_several_calls_of_fit_and_train_epoch_too() -> None:
    model, expected = loops.classifier(), loops.classifier()
    with loops.make(model, optimizer=loops.adam(model), val=loops.ready(), epochs=1) as trainer:
        trainer.fit()
        row = trainer.train_epoch()
        assert (trainer.epoch, row["epoch"]) == (2, 1)
        trainer.fit(steps=14)  # ends inside of the third epoch
        assert [(row["epoch"], row["step"]) for row in trainer.history] == [(0, 6), (1, 12), (2, 14)]
        assert "val/loss" not in trainer.history[-1]
        history = trainer.fit(epochs=4)
        assert [(row["epoch"], row["step"]) for row in history] == [(0, 6), (1, 12), (2, 18), (3, 24)]
    means = loops.plain_loop(expected, loops.adam(expected), loops.batches(), epochs=4)
    loops.assert_same_bits(model, expected)
    assert [row["train/loss"] for row in history] == pytest.approx(means, rel=1e-12)


class OwnLoss(nn.Module):
    """Returns what it is told to, as models of several libraries do."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = loops.classifier(), form

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        outputs = self.inner(x)
        loss = outputs.square().mean() if y is None else cross_entropy(outputs, y)
        return {"tensor": loss, "tuple": (loss, outputs), "dict": {"loss": loss, "logits": outputs}}[self.form]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_a_loss_is_found_in_what_models_return(form: str) -> None:
    assert_trains_as_the_plain_loop(OwnLoss(form), loss=None)


def as_dicts() -> list[dict[str, Tensor]]:
    return [{"input": x, "labels": y} for x, y in loops.batches()]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = loops.classifier()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.inner(left + right)


def one_by_one() -> Iterator[Any]:
    yield from loops.batches()


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(loops.samples())


class Batches:
    def __iter__(self) -> Iterator[Any]:
        return one_by_one()


def read_only(tensor: Tensor) -> Any:
    array = tensor.numpy().copy()
    array.setflags(write=False)
    return array


IN_ORDER: dict[str, Any] = {"batch_size": 4, "shuffle": False}
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a DataLoader": (DataLoader(loops.samples(), 4), {}),
    "ours": (DistributedDataLoader(loops.samples(), 4), {}),
    "a dataset": (loops.samples(), IN_ORDER),
    "an iterable dataset": (Streamed(), {"batch_size": 4}),
    "ready batches": (loops.ready(), {}),
    "an iterable of batches": (Batches(), {}),
    "a list of samples": ([*loops.samples()], IN_ORDER),
    "a list of dicts": ([{"input": x, "labels": int(y)} for x, y in loops.samples()], IN_ORDER),
    "tensors": (loops.samples().tensors, IN_ORDER),
    "arrays of numpy": (tuple(part.numpy() for part in loops.samples().tensors), IN_ORDER),
    "read-only arrays": (tuple(map(read_only, loops.samples().tensors)), IN_ORDER),
    "arrays by name": (dict(zip(("input", "labels"), loops.samples().tensors, strict=True)), IN_ORDER),
    "a function": (one_by_one, {}),
    "dicts": (loops.ready(as_dicts()), {}),
    "dicts whose target is named": (loops.ready([{"input": x, "y": y} for x, y in loops.batches()]), {"target": "y"}),
    "dicts of one step": (
        loops.ready(as_dicts()),
        {"step": lambda model, batch: cross_entropy(model(batch["input"]), batch["labels"])},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_comes_in_every_form(form: str) -> None:
    data, options = FORMS[form]
    assert_trains_as_the_plain_loop(loops.classifier(), train=data, **options)


@pytest.mark.parametrize("form", ["tensors", "arrays of numpy", "arrays by name", "a list of samples", "a dataset"])
def test_what_trains_is_evaluated_and_predicted_too(form: str) -> None:
    data, _ = FORMS[form]
    x, y = loops.samples().tensors
    with loops.make(val=data, batch_size=5) as trainer:
        predictions = trainer.predict(data, batch_size=7)
        losses = [trainer.evaluate(*given)["val/loss"] for given in ((), (data,), (loops.ready(),))]
    outputs = loops.classifier()(x).detach()
    torch.testing.assert_close(predictions, outputs)
    assert losses == pytest.approx([cross_entropy(outputs, y).item()] * 3)


class Words(nn.Module):
    """A number for each position of texts, and one for the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        found = self.table(ids)
        return {"each": found, "whole": found.mean(1)}


def test_predictions_of_uneven_batches_are_a_list_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    texts = [torch.arange(length).repeat(2, 1) for length in (2, 5, 3)]
    model = Words()
    with loops.make(model, step=lambda model, batch: model(batch)["whole"].sum(), train=loops.ready(texts)) as trainer:
        found = trainer.predict(loops.ready(texts))
    assert found["whole"].shape == (6, 2)
    assert all(torch.equal(part, model(ids)["each"]) for part, ids in zip(found["each"], texts, strict=True))
    assert "returns a list of batches' tensors" in caplog.text


INPUTS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda x: x,
    "an array": lambda x: x.numpy(),
    "a tuple of one": lambda x: (x,),
    "by name": lambda x: {"input": x},
    "a dataset": TensorDataset,
    "ready batches": lambda x: loops.ready([*x.split(5)]),
    "samples by name": lambda x: [{"input": row, "labels": 0} for row in x],
    "rows": lambda x: x.tolist(),
    "rows of tensors": lambda x: [*x],
}


@pytest.mark.parametrize("form", INPUTS)
def test_inputs_alone_are_predicted(form: str) -> None:
    x, _ = loops.samples().tensors
    with loops.make() as trainer:
        torch.testing.assert_close(trainer.predict(INPUTS[form](x)), loops.classifier()(x).detach())


def test_several_inputs_go_to_the_model_in_order() -> None:
    assert_trains_as_the_plain_loop(Pair(), train=loops.ready([(x / 2, x / 2, y) for x, y in loops.batches()]))


def test_a_generator_trains_one_epoch_and_says_why_not_two() -> None:
    with loops.make(train=one_by_one()) as trainer:
        assert len(trainer.fit()) == 1
        with pytest.raises(DataError, match=r"an iterator, which can be read once"):
            trainer.fit(epochs=2)


def test_a_dataset_of_hugging_face_is_one() -> None:
    datasets = pytest.importorskip("datasets")
    x, y = loops.samples().tensors
    data = datasets.Dataset.from_dict({"input": x.tolist(), "labels": y.tolist()}).with_format("torch")
    with loops.make(train=data, batch_size=5) as trainer:
        assert trainer.fit()[0]["step"] == 5  # and no sample is left out
        assert trainer.dream.samples_seen == loops.SAMPLES


def test_metrics_are_exact_by_name_by_function_and_by_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    x, y = loops.samples().tensors
    val = [(x[:13], y[:13]), (x[13:], y[13:])]
    metrics = {
        "f1": torchmetrics.F1Score("multiclass", num_classes=loops.CLASSES, average="macro"),
        "margin": lambda outputs, targets: outputs.max(1).values.mean(),
    }
    with (
        loops.make(val={"all": loops.ready(val), "half": loops.ready(val[:1])}, metrics=metrics) as trainer,
        loops.make(val=loops.ready(val), metrics=["accuracy"]) as named,
    ):
        found, by_name = trainer.evaluate(), named.evaluate()
    outputs = loops.classifier()(x).detach()
    assert by_name["val/accuracy"] == pytest.approx((outputs.argmax(1) == y).double().mean().item())
    for name, rows in (("all", slice(None)), ("half", slice(13))):
        f1 = torchmetrics.functional.f1_score(
            outputs[rows], y[rows], "multiclass", num_classes=loops.CLASSES, average="macro"
        )
        assert found[f"val/{name}/f1"] == pytest.approx(f1.item())
        assert found[f"val/{name}/margin"] == pytest.approx(outputs[rows].max(1).values.mean().item())


def test_values_of_a_step_of_ones_own_are_in_the_history() -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        outputs = model(batch[0])
        return {"loss": cross_entropy(outputs, batch[1]), "largest": outputs.max()}

    with loops.make(step=step, val=loops.ready()) as trainer:
        (row,) = trainer.fit()
    assert {"train/loss", "train/largest", "val/loss", "val/largest"} <= row.keys()


def built(parameters: dt.OptimizerParameters) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: dt.build_optimizer(parameters, model)


MOMENTUM = dt.OptimizerParameters(name="sgd", lr=0.1, momentum=0.5)
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "a class": ({"optimizer": torch.optim.SGD, "lr": 0.1}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "a function": ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "a name": ({"optimizer": "adamw", "lr": 0.02}, built(dt.OptimizerParameters(lr=0.02))),
    "parameters": ({"optimizer": MOMENTUM}, built(MOMENTUM)),
}


@pytest.mark.parametrize("form", OPTIMIZERS)
def test_an_optimizer_comes_in_every_form(form: str) -> None:
    options, by_hand = OPTIMIZERS[form]
    model, expected = loops.classifier(), loops.classifier()
    fit(loops.make(model, **options))
    loops.plain_loop(expected, by_hand(expected), loops.batches(), epochs=1)
    loops.assert_same_bits(model, expected)


def test_schedules_go_by_name_by_steps_and_by_a_metric() -> None:
    with loops.make(lr=0.1, schedule="cosine", epochs=2) as trainer:
        trainer.fit()
        assert trainer.history[-1]["lr"] == pytest.approx(0.0)
    with loops.make(
        optimizer=torch.optim.SGD, lr=1.0, schedule=partial(StepLR, step_size=3, gamma=0.5), epochs=2
    ) as trainer:
        assert [row["lr"] for row in trainer.fit()] == [0.25, 0.0625]
    plateau = partial(ReduceLROnPlateau, patience=0, factor=0.5, threshold=10.0)
    with loops.make(optimizer=torch.optim.SGD, lr=1.0, schedule=plateau, val=loops.ready(), epochs=3) as trainer:
        assert [row["lr"] for row in trainer.fit()] == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("is_object", [False, True])
def test_a_rate_that_follows_an_accuracy_falls_if_it_stops_rising(is_object: bool) -> None:
    model = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau: Any = ReduceLROnPlateau(optimizer, mode="max") if is_object else "plateau"
    accuracies = [min(epoch, 13) / 20 for epoch in range(26)]  # longer on the rise, and then flat, than it is patient
    values = iter([0.0, *accuracies])  # one is looked at before training
    data = TensorDataset(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))
    options: dict[str, Any] = {
        "monitor": "val/accuracy",
        "metrics": {"accuracy": lambda outputs, targets: next(values)},
    }
    with loops.make(
        model, optimizer=optimizer, schedule=plateau, train=data, val=data, epochs=26, **options
    ) as trainer:
        rates = [row["lr"] for row in trainer.fit()]
    assert rates == pytest.approx([1.0] * 24 + [0.1] * 2)  # 11 without a rise, after the one of epoch 13


def test_validations_come_by_steps_too(capsys: pytest.CaptureFixture[str]) -> None:
    mixture = Mixture({"one": loops.samples()})  # endless, and in an order of its own
    training = dt.TrainingParameters(max_steps=8, val_every_n_steps=3)
    with loops.make(train=mixture, batch_size=4, val=loops.ready(), training=training, progress=True) as trainer:
        (row,) = trainer.fit()
        assert [step for step, _ in trainer.dream.history_of("val/loss")] == [3, 6]
        assert row["val/loss"] == trainer.dream.history_of("val/loss")[-1][1]
    assert "step 6/8  val/loss 1." in capsys.readouterr().out


def test_functions_are_called_after_each_epoch_and_may_stop_the_run() -> None:
    def watch(trainer: Trainer, epoch: int, metrics: dict[str, float]) -> None:
        calls.append((epoch, trainer.epoch, sorted(metrics)))
        if epoch == 1:
            trainer.stop("the test says so")

    calls: list[Any] = []
    fit(loops.make(val=loops.ready(), epochs=5, callbacks=[watch]))
    assert calls == [(0, 1, ["train/loss", "val/loss"]), (1, 2, ["train/loss", "val/loss"])]


def test_a_run_with_a_name_goes_on_where_it_was_and_keeps_the_best() -> None:
    def run(name: str, **options: Any) -> Trainer:
        model = loops.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)
        return loops.make(model, optimizer=optimizer, val=loops.ready(), name=name, epochs=2, **options)

    straight = fit(run("straight"))
    with run("stopped") as trainer:
        trainer.fit(steps=8)
        assert [row["step"] for row in trainer.history] == [6, 8]
    with run("stopped") as trainer:
        trainer.fit()
        loops.assert_same_bits(trainer.model, straight.model)
        without_time = [{k: v for k, v in row.items() if k != "seconds"} for row in straight.history]
        assert [{k: v for k, v in row.items() if k != "seconds"} for row in trainer.history] == without_time
        losses = [row["val/loss"] for row in trainer.history]
        assert trainer.best == min(losses) != losses[-1]
        trainer.load_best()
        assert trainer.evaluate()["val/loss"] == trainer.best
        assert {path.name for path in Path("runs/simple/simple/stopped").iterdir()} >= {"checkpoints", "metrics.jsonl"}
        assert len(trainer.dream.checkpoints()) == 2


@pytest.mark.parametrize("by", ["torchmetrics", "mode"])
def test_the_best_accuracy_is_the_highest(by: str) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    values = iter([0.0, 0.2, 0.9, 0.5])  # the first is looked at before training
    metrics: dict[str, Any] = {
        "torchmetrics": torchmetrics.Accuracy("multiclass", num_classes=loops.CLASSES),
        "mode": lambda outputs, targets: torch.tensor(next(values)),
    }
    monitor: Any = {"val/mode": "max"} if by == "mode" else "val/torchmetrics"
    with loops.make(
        val=loops.ready(loops.batches()[:1]), metrics={by: metrics[by]}, monitor=monitor, epochs=3, lr=0.05
    ) as trainer:
        best = max(row[f"val/{by}"] for row in trainer.fit())
        assert trainer.best == best


def test_a_run_without_a_name_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, here = tmp_path / "tmp", tmp_path / "here"
    scratch.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    trainer = loops.make(val=loops.ready(), epochs=2)
    trainer.fit()
    assert len([*scratch.iterdir()]) == 1
    del trainer
    gc.collect()
    assert [*scratch.iterdir()] == [*here.iterdir()] == []


def test_it_prints_a_line_for_each_epoch(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with loops.make(val=loops.ready(), metrics=["accuracy"], epochs=2, progress=True) as trainer:
        trainer.evaluate()
        trainer.fit()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 1/2  step 6/12  train/loss 1.")
    assert re.fullmatch(r"epoch 2/2 .* val/loss \S+  val/accuracy \S+  \d\.\d s", second)
    assert caplog.text == ""


def test_early_stopping_without_a_metric_goes_by_the_monitor() -> None:
    """A loss that falls is never better where the highest is best."""
    x = torch.randn(32, 4)
    data, stopping = (x, x.sum(1, keepdim=True)), dt.EarlyStopping(patience=2)
    highest: dict[str, Literal["min", "max"]] = {"val/loss": "max"}
    with dt.Trainer(
        nn.Linear(4, 1), loss="mse", lr=0.01, train=data, val=data, epochs=9, monitor=highest, callbacks=[stopping]
    ) as trainer:
        trainer.fit()
        assert trainer.epoch == 3
