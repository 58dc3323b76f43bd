"""TrainingParameters: what is valid, what a limit of zero means, and how accumulation is derived."""

from datetime import timedelta
from typing import Any

import pytest

from dream_trainer.config.training_parameters import TrainingParameters, accumulation_steps, micro_batch_size
from dream_trainer.errors import ConfigError


def test_a_run_without_any_limit_stops_after_one_epoch() -> None:
    assert TrainingParameters().epoch_limit == 1


@pytest.mark.parametrize("limit", [{"max_steps": 5}, {"max_time": timedelta(hours=1)}, {"max_samples": 9}])
def test_another_limit_alone_leaves_epochs_unlimited(limit: dict[str, Any]) -> None:
    assert TrainingParameters(**limit).epoch_limit is None


@pytest.mark.parametrize(("batch_size", "dp_size", "expected"), [(8, 1, 16), (8, 4, 4), (32, 4, 1)])
def test_accumulation_fills_the_global_batch(batch_size: int, dp_size: int, expected: int) -> None:
    assert accumulation_steps(TrainingParameters(gradient_accumulation_steps=4), batch_size, dp_size) == 4
    assert accumulation_steps(TrainingParameters(global_batch_size=128), batch_size, dp_size) == expected


@pytest.mark.parametrize(
    ("total", "dp_size", "expected"), [(None, 8, 32), (128, 4, 32), (64, 4, 16), (96, 1, 32), (80, 2, 20), (66, 4, 32)]
)
def test_a_micro_batch_is_the_largest_that_fills_a_ranks_share(total: int | None, dp_size: int, expected: int) -> None:
    assert micro_batch_size(TrainingParameters(global_batch_size=total), dp_size) == expected


@pytest.mark.parametrize(
    ("total", "batch_size", "dp_size", "message"),
    [
        (100, 32, 2, "not a multiple of 64 .*batch size of 1, 2, 5, 10, 25 or 50, .*=64 or 128"),
        (10, 2, 4, "global_batch_size=8 or 16, or 1 or 5 data-parallel ranks"),
        (33, 8, 2, r"Use global_batch_size=32 or 48\.$"),
    ],
)
def test_wrong_sizes_are_answered_with_those_that_do(total: int, batch_size: int, dp_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        accumulation_steps(TrainingParameters(global_batch_size=total), batch_size, dp_size)


def test_errors_in_several_fields_come_as_one() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingParameters(n_epochs=-1, val_batch_size=0, train_batch_size=8)
    first, *others = str(caught.value).splitlines()
    assert first == "2 errors in the config:"
    assert [line.split("=")[0] for line in others] == ["- n_epochs", "- val_batch_size"]
