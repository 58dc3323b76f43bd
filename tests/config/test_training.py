"""TrainingParameters: what is valid, what a limit of zero means, and how accumulation is derived."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from dream_trainer.config import TrainingParameters, accumulation_steps
from dream_trainer.errors import ConfigError


def test_a_run_without_any_limit_stops_after_one_epoch() -> None:
    assert TrainingParameters().epoch_limit == 1


@pytest.mark.parametrize("limit", [{"max_steps": 5}, {"max_time": timedelta(hours=1)}, {"max_samples": 9}])
def test_another_limit_alone_leaves_epochs_unlimited(limit: dict[str, Any]) -> None:
    assert TrainingParameters(**limit).epoch_limit is None


def test_accumulation_is_as_configured_without_a_global_batch_size() -> None:
    assert accumulation_steps(TrainingParameters(gradient_accumulation_steps=4), batch_size=32, dp_size=8) == 4


@pytest.mark.parametrize(("batch_size", "dp_size", "expected"), [(8, 1, 16), (8, 4, 4), (32, 4, 1)])
def test_accumulation_fills_the_global_batch(batch_size: int, dp_size: int, expected: int) -> None:
    assert accumulation_steps(TrainingParameters(global_batch_size=128), batch_size, dp_size) == expected


def test_a_batch_size_that_does_not_divide_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"not a multiple of 64 .*batch size of 1, 2, 5, 10, 25 or 50, .*=64 or 128"):
        accumulation_steps(TrainingParameters(global_batch_size=100), batch_size=32, dp_size=2)


def test_a_world_that_does_not_divide_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=8 or 16, or 1 or 5 data-parallel ranks"):
        accumulation_steps(TrainingParameters(global_batch_size=10), batch_size=2, dp_size=4)


def test_every_field_has_a_line_of_help() -> None:
    import inspect

    source = inspect.getsource(TrainingParameters)
    for f in fields(TrainingParameters):
        declaration = source[source.index(f"    {f.name}: ") :].splitlines()
        assert declaration[1].startswith('    """'), f.name


def test_of_a_global_batch_that_does_not_fit_only_sizes_are_proposed_that_do() -> None:
    with pytest.raises(ConfigError) as caught:
        accumulation_steps(TrainingParameters(global_batch_size=33), batch_size=8, dp_size=2)
    assert str(caught.value).endswith("Use global_batch_size=32 or 48.")
    for total in (32, 48):
        accumulation_steps(TrainingParameters(global_batch_size=total), batch_size=8, dp_size=2)
