"""Which values of a metric are best, by what is known of it."""

from typing import Any

import pytest

from tests.api import ConfigError, mode_by_name, mode_of

LOWER = ["val/loss", "loss", "val/near/loss", "val/perplexity", "val/WER"]
HIGHER = ["val/accuracy", "accuracy", "val/loss/accuracy", "val/top5", "val/F1", "val/mAP"]
UNKNOWN = ["val/score", "val/negative_loss", "", "val/loss/x", "val/lossy", "accuracy_drop", "1-accuracy", "no_loss"]


@pytest.mark.parametrize(
    ("metric", "mode"),
    [*((name, "min") for name in LOWER), *((name, "max") for name in HIGHER), *((name, None) for name in UNKNOWN)],
)
def test_the_last_part_of_a_well_known_name_says_which_values_are_better(metric: str, mode: str | None) -> None:
    assert mode_by_name(metric) == mode


def test_what_was_said_counts_over_the_metrics_object_and_that_over_its_name() -> None:
    def found(metric: str, mode: Any, higher: bool | None) -> str:
        return mode_of(metric, mode, higher_is_better=higher, named_by="monitor", set_by="mode")

    assert found("val/accuracy", "min", True) == "min"
    assert found("val/accuracy", None, False) == "min"
    assert found("val/x", None, True) == "max"
    assert found("val/accuracy", None, None) == "max"
    with pytest.raises(ConfigError, match=r'^monitor=\'val/x\' does not say whether.*Set mode="min" or "max"\.$'):
        found("val/x", None, None)
