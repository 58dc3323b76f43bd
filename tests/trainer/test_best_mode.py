"""Whether the lowest or the highest value of a metric is best, where the config leaves that to the metric."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torchmetrics

import dream_trainer as dt
from tests.api import ConfigError, EarlyStopping, read_record
from tests.trainer.saves import Saves, fit, make_config, steps_of
from tests.trainer.small import Batch, errors_of

VALUES = (0.25, 0.75, 0.5, 0.5)
EACH_STEP: dict[str, Any] = {"save_every_n_steps": 1, "keep_last": 1, "keep_best": 1, "resume": None}


class Scored(Saves):
    """Its validations, after each of four steps, find VALUES under a name, or in an object of torchmetrics."""

    name = "accuracy"

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {self.name: torch.tensor(VALUES[self.global_step - 1], dtype=torch.float64)}


class Quality(torchmetrics.MeanMetric):
    higher_is_better = True


class Measured(Scored):
    def configure_metrics(self) -> None:
        self.quality = Quality()

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.quality.update(VALUES[self.global_step - 1])
        return {"loss": torch.tensor(1.0)}


class Collected(Measured):
    def configure_metrics(self) -> None:
        self.all_metrics = torchmetrics.MetricCollection({"quality": Quality()}, prefix="of_")

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.all_metrics.update(VALUES[self.global_step - 1])
        return {}


def config(metric: str, **options: Any) -> Any:
    training = {"max_steps": 4, "val_every_n_steps": 1, "val_every_n_epochs": None}
    return make_config(training=training, **EACH_STEP | {"best_metric": metric} | options)


@pytest.mark.parametrize(
    ("trainer_class", "metric", "options", "best"),
    [
        (Scored, "val/accuracy", {}, 2),
        (Scored, "val/accuracy", {"best_mode": "min"}, 1),
        (Measured, "val/quality", {}, 2),
        (Collected, "val/of_quality", {}, 2),
    ],
)
def test_the_best_is_the_better(trainer_class: type[Scored], metric: str, options: dict[str, Any], best: int) -> None:
    trainer = fit(trainer_class(config(metric, **options)))
    assert steps_of(trainer) == [best, 4]
    record = read_record(trainer.run_dir)
    assert record is not None
    assert record.best[metric]["step"] == best
    with trainer_class(config(metric, **options | {"resume": "best"})) as again:
        again.evaluate()
        assert again.global_step == best


def test_saving_on_the_best_and_early_stopping_know_it_too() -> None:
    options = {"save_every_n_steps": None, "save_every_n_epochs": None, "save_at_end": False, "save_on_best": True}
    assert fit(Scored(config("val/accuracy", **options))).saved == [1, 2]
    for metric, kind in (("val/accuracy", Scored), ("val/quality", Measured)):
        stopping = EarlyStopping(metric, patience=1)
        trainer = fit(kind(config(metric, experiment=kind.__name__, callbacks=[stopping])))
        assert (trainer.global_step, stopping.best) == (3, 0.75)


def test_early_stopping_goes_by_the_best_metric_of_the_config() -> None:
    for mode, step, best in ((None, 3, 0.75), ("min", 2, 0.25)):
        stopping = EarlyStopping(patience=1)
        asked = config("val/accuracy", best_mode=mode, experiment=str(mode), callbacks=[stopping])
        assert (fit(Scored(asked)).global_step, stopping.best) == (step, best)


class Unknown(Scored):
    name = "score"


KEEPS = config("val/score")
STOPS = config("val/loss", callbacks=[EarlyStopping("val/score")])
UNSAID = '\'val/score\' does not say whether lower or higher values are better. Set {}="min" or "max".'


@pytest.mark.parametrize(("asked", "field"), [(KEEPS, "best_mode"), (STOPS, "mode")])
def test_a_name_that_says_nothing_is_an_error_before_the_first_step(asked: Any, field: str) -> None:
    with Unknown(asked) as trainer, pytest.raises(ConfigError, match=UNSAID.format(field)):
        trainer.fit()
    assert trainer.global_step == 0


class TwoLoaders(Scored):
    def configure_dataloaders(self) -> Any:
        train, val = super().configure_dataloaders()
        return train, {"near": val, "far": val}


@pytest.mark.parametrize(
    ("kind", "metric", "sanity", "advice", "step"),
    [
        (Scored, "accuracy", 0, r"begin with val/\. Did you mean 'val/accuracy'\?", 0),
        (TwoLoaders, "val/accuracy", 0, "Did you mean 'val/near/accuracy' or 'val/far/accuracy'", 0),
        (Scored, "val/acuracy", 0, r'Set best_mode="min" or "max"\. Did you mean \'val/accuracy\'\?', 0),
        (Scored, "val/acc", 0, r"Did you mean 'val/accuracy'\? Use one of \['val/accuracy'\]", 1),
        (Scored, "val/acc", 1, r"Did you mean 'val/accuracy'\? Use one of \['val/accuracy'\]", 0),
    ],
)
def test_a_best_metric_that_never_comes_is_an_error_as_soon_as_that_is_known(
    kind: type[Scored], metric: str, sanity: int, advice: str, step: int
) -> None:
    asked = config(metric)
    asked.training_parameters = replace(asked.training_parameters, num_sanity_val_steps=sanity)
    with kind(asked) as trainer, pytest.raises(ConfigError, match=f"best_metric='{metric}'.*{advice}"):
        trainer.fit()
    assert trainer.global_step == step


def fit_misnamed() -> None:
    fit(Scored(config("val/f1")))


def test_every_rank_raises_it() -> None:
    for error in errors_of(fit_misnamed):
        assert "best_metric='val/f1' is not among the validation's metrics" in error


def test_the_mode_of_checkpoints_holds_for_best_metrics_and_two_modes_are_refused() -> None:
    asked = config("val/accuracy", best_mode="min")
    assert fit(Scored(asked)).best == {"val/accuracy": min(VALUES)}
    other = replace(asked, experiment="other", eval_parameters=dt.EvalParameters(best_metrics={"val/accuracy": "max"}))
    with pytest.raises(ConfigError, match="best_metrics has val/accuracy='max', and checkpoint_parameters.best_metric"):
        fit(Scored(other))
