"""EvalMixin: named loaders, torchmetrics, best values, `evaluate()` and `predict()`."""

import os
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric, MetricCollection, SumMetric

import dream_trainer as dt
from tests.api import DistributedDataLoader, EvalParameters, HookError, PerRankLoader
from tests.trainer import small
from tests.trainer.small import Alone, Batch, Samples, batches, fit, make_config, weights
from tests.worlds import run_world


class Checked(small.Validates, Alone, dt.EvalMixin):
    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.metrics = [*vars(self).get("metrics", []), metrics]


def mean_loss(model: nn.Module, data: list[Batch]) -> float:
    with torch.no_grad():
        return mse_loss(model(torch.cat([x for x, _, _ in data])), torch.cat([y for _, y, _ in data])).item()


def test_named_loaders_are_validated_under_their_names() -> None:
    class Named(Checked):
        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            names.append(self.val_name)
            return super().validation_step(batch, batch_idx)

    names: list[str] = []
    easy, hard = batches(2), batches(3)[1:]
    trainer = fit(Named(make_config(n_epochs=1), batches(2), {"easy": easy, "hard": hard}))
    assert names == ["easy", "easy", "hard", "hard"]
    assert trainer.metrics == [
        {
            "val/easy/loss": pytest.approx(mean_loss(trainer.model, easy), rel=1e-12),
            "val/hard/loss": pytest.approx(mean_loss(trainer.model, hard), rel=1e-12),
        }
    ]
    assert trainer.val_name == ""
    with Checked(make_config(), batches(2)) as trainer:
        found = trainer.evaluate({"long": DataLoader(Samples(10), 4)})
        assert found == {"val/long/loss": pytest.approx(mean_loss(trainer.model, batches(5)), rel=1e-12)}


class Scripted(Checked):
    """small.Validates to given values, one after the other."""

    def __init__(self, config: Any, values: list[float]) -> None:
        super().__init__(config, batches(1), batches(1))
        self.values = values

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.values[self.current_epoch]}


@pytest.mark.pitfall(7)
@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("min", [2.0, 0.0, 1.0], 0.0),
        ("max", [0.0, -1.0, -2.0], 0.0),
        ("max", [-3.0, -1.0, -2.0], -1.0),
        ("min", [-3.0, 1.0, -4.0], -4.0),
        ("min", [float("nan"), 5.0, float("nan")], 5.0),
        ("max", [float("nan"), -5.0, float("nan")], -5.0),
        ("min", [float("inf"), 3.0], 3.0),
    ],
)
def test_the_best_value_is_kept_and_zero_is_one_and_nan_is_none(mode: Any, values: list[float], best: float) -> None:
    config = make_config(n_epochs=len(values))
    config.eval_parameters = EvalParameters(best_metrics={"val/loss": mode})
    assert fit(Scripted(config, values)).best == {"val/loss": best}


def test_a_missing_or_nan_metric_has_no_best_value_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(n_epochs=2)
    config.eval_parameters = EvalParameters(best_metrics={"val/accuracy": "max", "val/loss": "min"})
    assert fit(Scripted(config, [float("nan")] * 2)).best == {}
    (said,) = [line for line in caplog.messages if "best_metrics" in line]
    assert said == "best_metrics names ['val/accuracy'], which the validation did not give. It gave ['val/loss']."


def test_evaluate_works_before_fit_and_alone_and_changes_nothing() -> None:
    with Checked(make_config(n_epochs=1), batches(2), batches(3)) as trainer:
        first = trainer.evaluate()
        before = weights(trainer.model)
        assert first == {"val/loss": pytest.approx(mean_loss(trainer.model, batches(3)), rel=1e-12)}
        other = trainer.evaluate(batches(5))
        assert other == {"val/loss": pytest.approx(mean_loss(trainer.model, batches(5)), rel=1e-12)}
        assert all(torch.equal(value, before[name]) for name, value in weights(trainer.model).items())
        assert trainer.global_step == 0
        assert trainer.best == {}
        trainer.fit()
        assert trainer.global_step == 2
        assert trainer.evaluate() == trainer.metrics[-1]


@pytest.mark.parametrize(
    ("cls", "data", "call", "told"),
    [
        (type("NoStep", (Alone, dt.EvalMixin), {}), (), lambda t: t.evaluate(batches(1)), "validation_step"),
        (Checked, (), lambda t: t.evaluate({}), "there is no validation loader"),
        (Checked, ({},), lambda t: t.evaluate(), "there is no validation loader"),
    ],
)
def test_evaluate_without_a_step_or_data_is_an_error(cls: Any, data: Any, call: Any, told: str) -> None:
    with pytest.raises(HookError, match=told):
        call(cls(make_config(), batches(1), *data))


def test_a_loader_without_a_batch_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fit(Checked(make_config(n_epochs=2), batches(1), {"far": []}))
    with Predicts(make_config(), batches(1)) as trainer:
        assert trainer.evaluate([]) == {}
        assert trainer.predict([]) == []
    assert caplog.text.count("the validation loader 'far' gave no batch on any rank") == 1
    assert caplog.text.count("the validation loader gave no batch on any rank") == 1
    assert caplog.text.count("the loader to predict gave no batch on any rank") == 1


class Predicts(Checked):
    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        assert not torch.is_grad_enabled()
        assert not self.model.training
        return {"y": self.model(batch[0]), "number": batch[2]}


def test_predict_gives_the_results_in_order_on_the_cpu() -> None:
    with Predicts(make_config(), batches(1)) as trainer:
        found = trainer.predict(DataLoader(Samples(7), 3, shuffle=True))
        assert found["number"].tolist() == list(range(7))
        with torch.no_grad():
            expected = trainer.model(Samples(7).x)
        torch.testing.assert_close(found["y"], expected)
        assert not found["y"].requires_grad
        assert trainer.model.training


def test_predict_takes_validation_loaders_by_name() -> None:
    with Predicts(make_config(), batches(1), DataLoader(Samples(5), 2)) as trainer:
        assert trainer.predict()["number"].tolist() == trainer.predict("val")["number"].tolist() == list(range(5))
        with pytest.raises(HookError, match=r"predict\('val/far'\) names no validation loader. Use one of \['val'\]"):
            trainer.predict("val/far")
    with Predicts(make_config(), batches(1), {"far": DataLoader(Samples(3), 2)}) as trainer:
        assert trainer.predict("val/far")["number"].tolist() == [0, 1, 2]


class SumOfEntries(Metric):
    """Keeps an entry for each sample, as ROUGEScore and MeanAveragePrecision do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("entries", [], dist_reduce_fx=None)

    def update(self, values: torch.Tensor) -> None:
        self.entries.extend(values)

    def compute(self) -> torch.Tensor:
        return torch.stack(self.entries).sum()


class Measured(small.Validates):
    """The same measures by torchmetrics and by hand."""

    def configure_metrics(self) -> None:
        from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision
        from torchmetrics.regression import PearsonCorrCoef

        # These keep what they get in lists, which are empty or shorter on some ranks.
        self.curves = MetricCollection({"auroc": BinaryAUROC(), "precision": BinaryAveragePrecision()}, prefix="curve_")
        self.entries, self.never = SumOfEntries(), BinaryAUROC()
        self._own_entries = SumMetric()
        self.mae = MeanAbsoluteError().set_dtype(torch.float64)
        self.more = MetricCollection({"pearson": PearsonCorrCoef().set_dtype(torch.float64)})
        self.kept = nn.ModuleDict({"mse": MeanSquaredError().set_dtype(torch.float64)})

    def pre_val_epoch(self) -> None:
        self.numbers: list[int] = []

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if not self.is_padding_batch:
            self.numbers += batch[2].tolist()
        prediction = self.model(batch[0])
        self.mae(prediction, batch[1])
        self.more.update(prediction.flatten(), batch[1].flatten())
        self.kept["mse"].update(prediction, batch[1])
        self.curves.update(prediction.flatten().sigmoid(), (batch[2] % 2).flatten())
        self.entries.update(batch[2])
        self._own_entries.update(batch[2].sum())
        return super().validation_step(batch, batch_idx)

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics
        assert float(self._own_entries.compute()) == metrics["val/entries"]
        self._own_entries.reset()

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.model(batch[0])


def test_a_metric_of_training_also_one_that_is_reset_in_each_epoch_is_none_of_validations() -> None:
    class Counting(Checked):
        def setup(self) -> None:
            super().setup()
            self.trained, self.of_epoch, self.validated = SumMetric(), SumMetric(), SumMetric()
            self.totals: list[tuple[float, float]] = []

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.trained.update(1.0)
            self.of_epoch.update(1.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.validated.update(1.0)
            return {}

        def post_epoch(self) -> None:
            self.totals.append((float(self.trained.compute()), float(self.of_epoch.compute())))
            self.of_epoch.reset()

    for every in (2, 4):  # with 4 it has been updated as often at each validation
        trainer = fit(Counting(make_config(n_epochs=3, val_every_n_steps=every), batches(4), batches(3)))
        assert trainer.totals == [(4, 4), (8, 4), (12, 4)]
        assert trainer.metrics == [{"val/validated": 3.0}] * (12 // every)


def test_what_wraps_a_metric_is_validations_if_its_metric_is() -> None:
    from torchmetrics.classification import MulticlassAccuracy
    from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, Running

    class Wrapped(Checked):
        def setup(self) -> None:
            super().setup()
            self.by_class = ClasswiseWrapper(MulticlassAccuracy(2, average=None), labels=["no", "yes"])
            self.extremes = MinMaxMetric(MulticlassAccuracy(2))
            self.of_training = Running(SumMetric(), window=2)
            self.never = ClasswiseWrapper(MulticlassAccuracy(2, average=None), prefix="never_")

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.of_training.update(1.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            for metric in (self.by_class, self.extremes):
                metric.update(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
            return {}

    trainer = fit(Wrapped(make_config(n_epochs=2, num_sanity_val_steps=1), batches(4), batches(3)))
    accuracies = {"val/multiclassaccuracy_no": 0.5, "val/multiclassaccuracy_yes": 1.0}
    extremes = {"val/raw": 0.75, "val/min": 0.75, "val/max": 0.75}
    assert trainer.metrics[-2:] == [accuracies | extremes] * 2
    assert trainer.of_training.compute() == 2.0


def test_a_metric_that_training_and_validation_both_update_is_an_error() -> None:
    class Shared(Checked):
        def setup(self) -> None:
            super().setup()
            self.both = SumMetric()

        def move_batch(self, batch: Batch, device: torch.device) -> Batch:
            self.both.update(1.0)
            return batch

    with pytest.raises(HookError, match="'both' is updated in training and in validation.*Give each its own"):
        fit(Shared(make_config(n_epochs=1), batches(4), batches(3)))


def test_a_metric_of_several_numbers_and_names_that_are_taken_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    from torchmetrics.classification import BinaryConfusionMatrix

    class Vector(Checked):
        def setup(self) -> None:
            super().setup()
            self.confusion, self.loss = BinaryConfusionMatrix(), MeanAbsoluteError()
            self.one, self.other = (MetricCollection({"off": MeanAbsoluteError()}) for _ in range(2))

        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.confusion.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
            self.loss.update(torch.zeros(2), torch.ones(2))
            self.one.update(torch.zeros(2), torch.ones(2))
            self.other.update(torch.ones(2), torch.ones(2))
            return {"loss": 7.0}

    trainer = fit(Vector(make_config(n_epochs=2), batches(1), batches(1)))
    assert trainer.metrics == [{"val/loss": 1.0, "val/off": 0.0}] * 2
    said = [line for line in caplog.messages if "metric" in line]
    assert [line.split(",")[0] for line in said] == [
        "metric 'confusion' computes a tensor of shape (2",
        "'val/loss' is logged twice",
        "'val/off' is logged twice",
    ]


class SpreadMeasured(Measured, small.Spread, dt.EvalMixin):
    pass


class Unsized:
    def __init__(self, data: list[Batch]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def unequal(rank: int) -> list[Batch]:
    """A rank's own batches: their sizes differ, and ranks have different numbers of them."""
    data, sizes = Samples(6), [2, 3, 1]
    return list(zip(data.x.split(sizes), data.y.split(sizes), torch.arange(6).split(sizes), strict=True))[: rank + 1]


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    are_dealt, own = os.environ["WORLD_SIZE"] != "1", unequal(int(os.environ["RANK"]))
    loaders = {f"dealt in {size}": DataLoader(Samples(7), size, drop_last=are_dealt) for size in (2, 4, 8)}
    loaders |= {"unequal": PerRankLoader(own), "unsized": PerRankLoader(Unsized(own))}
    for name, cls in {"replicate": SpreadMeasured, "fsdp": small.sharded(SpreadMeasured)}.items():
        for kind, loader in loaders.items():
            config = make_config(n_epochs=2, fsdp=small.BY_BLOCKS if kind == "unequal" else None)
            with cls(config, DistributedDataLoader(Samples(12), 2), loader) as trainer:
                alone = trainer.evaluate(DistributedDataLoader(Samples(3), 1))
                trainer.fit()
                again, numbers = trainer.evaluate(), trainer.numbers
                predicted = trainer.predict(DataLoader(Samples(7), 2))
                found[f"{name}/{kind}"] = (trainer.metrics, again, alone, predicted, weights(trainer.model), numbers)
                one = trainer.evaluate(DataLoader(Samples(1), 4))  # of several ranks the others have no sample
                found[f"{name}/{kind}/one"] = (
                    one,
                    trainer.metrics,
                    None,
                    None,
                    weights(trainer.model),
                    trainer.numbers,
                )
    return found


def by_hand(state: dict[str, torch.Tensor], numbers: list[int]) -> dict[str, float]:
    model = small.network()
    model.load_state_dict(state)
    data = Samples(8)
    with torch.no_grad():
        predicted, y = model(data.x)[numbers], data.y[numbers]
    several = {}
    if len(numbers) > 1:
        positive, negative = (predicted.flatten()[torch.tensor(numbers) % 2 == odd] for odd in (1, 0))
        several = {
            "val/pearson": torch.corrcoef(torch.stack([predicted.flatten(), y.flatten()]))[0, 1].item(),
            "val/curve_auroc": (positive.unsqueeze(1) > negative).double().mean().item(),
        }
    return several | {
        "val/mae": (predicted - y).abs().mean().item(),
        "val/entries": sum(numbers),
        "val/kept.mse": (predicted - y).square().mean().item(),
        "val/loss": (predicted - y).square().mean().item(),
    }


@pytest.mark.pitfall(46)
@pytest.mark.pitfall(45)
@pytest.mark.pitfall(13)
@pytest.mark.parametrize("world_size", [1, 3])
def test_metrics_are_exact_over_ranks_with_padding_batches_and_predictions_are_in_order(world_size: int) -> None:
    results = run_world(measure, world_size)
    for case in results[0]:
        metrics, _, alone, predicted, state, _ = results[0][case]
        # As text, where NaN is as NaN: the correlation of one sample.
        assert all(repr(rank[case][:2]) == repr((metrics, metrics)) for rank in results), case
        counted = sorted(number for rank in results for number in rank[case][5])
        if case.endswith("one"):
            assert counted == [0]
        else:
            own = sorted(n for rank in range(world_size) for batch in unequal(rank) for n in batch[2].tolist())
            assert counted == (list(range(7)) if "dealt" in case else own), case
            assert set(alone) == set(metrics)
            model = small.network()
            model.load_state_dict(state)
            torch.testing.assert_close(predicted, model(Samples(7).x).detach())
            assert all(torch.equal(rank[case][3], predicted) for rank in results)
        expected = by_hand(state, counted)
        for name in expected:
            accuracy = 1e-6 if name == "val/curve_auroc" else 1e-9  # it computes in float32
            assert metrics[name] == pytest.approx(expected[name], rel=accuracy), (case, name)
        names = {"val/pearson", "val/curve_auroc", "val/curve_precision"}
        assert metrics.keys() == expected.keys() | names, case
