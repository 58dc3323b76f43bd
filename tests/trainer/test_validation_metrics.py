"""Metrics of a validation by themselves: a dict stands in for the trainer's attributes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api import HookError, Ranks, ValidationMetrics

torchmetrics = pytest.importorskip("torchmetrics")


class Held:
    """Two metrics, held as a trainer would."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {
            "trained": torchmetrics.SumMetric(),
            "kept": {"validated": torchmetrics.SumMetric()},
            "other": "no metric",
        }
        self.said: list[str] = []
        self.metrics = ValidationMetrics(
            self.named, self.attributes, Ranks.alone(), lambda key, message: self.said.append(message)
        )

    def named(self) -> dict[str, Any]:
        return {"trained": self.attributes["trained"], "kept.validated": self.attributes["kept"]["validated"]}

    def update(self, value: float) -> None:
        self.attributes["kept"]["validated"].update(value)

    def update_and_fail(self, value: float) -> None:
        self.update(value)
        raise TypeError


def test_a_loaders_values_are_of_what_was_updated_since_it_started() -> None:
    held = Held()
    with held.metrics.validation():
        for values in ((1.0, 2.0), (3.0, 4.0)):
            held.metrics.start_loader()
            for value in values:
                held.update(value)
            assert held.metrics.values() == {"kept.validated": sum(values)}


def test_what_training_updates_is_neither_reset_nor_computed_and_kept_in_checkpoints() -> None:
    held = Held()
    held.attributes["trained"].update(5.0)
    with held.metrics.validation():
        held.metrics.start_loader()
        held.update(1.0)
        assert held.metrics.values() == {"kept.validated": 1.0}
    assert held.attributes["trained"].compute() == 5.0
    assert list(held.metrics.only_of_training(held.named())) == ["trained"]


def test_a_metric_of_training_and_validation_both_is_refused() -> None:
    held = Held()
    held.update(5.0)
    with held.metrics.validation():
        held.metrics.start_loader()
        held.update(1.0)
        with pytest.raises(HookError, match="'kept.validated' is updated in training and in validation"):
            held.metrics.values()


def test_a_padding_batch_counts_for_nothing_whatever_happens_in_it() -> None:
    held = Held()
    with held.metrics.validation():
        held.metrics.start_loader()
        held.update(1.0)
        with pytest.raises(TypeError), held.metrics.padding():
            held.update_and_fail(100.0)
        with held.metrics.padding():
            held.update(100.0)
        assert held.metrics.values() == {"kept.validated": 1.0}
