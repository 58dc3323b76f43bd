"""`checkpoint_parameters.best_metric` and `eval_parameters.best_metrics` agree on which values are best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import ConfigError, read_record
from tests.trainer.saves import VALIDATING, Saves, Validated, fit, make_config


def config(mode: Any, **evaluation: Any) -> Any:
    made = make_config(training=VALIDATING, best_metric="val/loss", best_mode=mode, callbacks=[Validated()])
    return replace(made, eval_parameters=dt.EvalParameters(**evaluation)) if evaluation else made


def test_the_mode_of_checkpoints_holds_where_best_metrics_was_left_alone() -> None:
    trainer = fit(Saves(config("max")))
    values = [metrics["val/loss"] for _, metrics in trainer.get_callback(Validated)._found]
    assert min(values) < max(values) == trainer.best["val/loss"]
    record = read_record(trainer.run_dir)
    assert record is not None
    assert record.best["val/loss"]["mode"] == "max"
    assert record.best["val/loss"]["value"] == max(values)


def test_two_modes_for_one_metric_are_refused() -> None:
    with pytest.raises(ConfigError, match="best_metrics has val/loss='min', and checkpoint_parameters.best_metric"):
        fit(Saves(config("max", best_metrics={"val/loss": "min", "val/other": "max"})))
