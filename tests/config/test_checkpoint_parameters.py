"""CheckpointParameters: what cannot work is an error that names the field, its value and what to do."""

from __future__ import annotations

from typing import Any

import pytest

import dream_trainer as dt
from dream_trainer.config.command_line import parse
from tests.trainer.saves import make_config

METRIC = {"best_metric": "val/loss"}


def test_by_default_each_epoch_and_the_end_are_saved_and_everything_is_kept() -> None:
    parameters = dt.CheckpointParameters()
    assert parameters.saves
    assert (parameters.save_every_n_epochs, parameters.save_at_end, parameters.save_on_exception) == (1, True, True)
    assert (parameters.keep_last, parameters.keep_every_n_steps, parameters.keep_best) == (None, None, None)
    assert (parameters.resume, parameters.async_save, parameters.on_save_error) == ("auto", True, "raise")


OFF: dict[str, Any] = {"save_every_n_epochs": None, "save_at_end": False}


@pytest.mark.parametrize(
    "options",
    [
        {"save_every_n_steps": 5},
        {"save_every_n_minutes": 0.5},
        {"save_every_n_epochs": 2},
        {"save_at_end": True},
        {"save_on_best": True, **METRIC},
    ],
    ids=str,
)
def test_any_rule_saves_and_none_does_not(options: dict[str, Any]) -> None:
    assert not dt.CheckpointParameters(**OFF).saves
    assert dt.CheckpointParameters(**(OFF | options)).saves


def test_the_command_line_sets_them() -> None:
    given = {
        "save-every-n-minutes": "2.5",
        "save-every-n-epochs": "None",
        "when-busy": "skip",
        "on-save-error": "warn",
        "keep-best": "3",
        "best-metric": "val/loss",
        "best-mode": "max",
        "resume": "best",
    }
    arguments = [text for name, value in given.items() for text in (f"--checkpoint-parameters.{name}", value)]
    parsed: Any = parse(make_config(), [*arguments, "--checkpoint-parameters.no-async-save"]).checkpoint_parameters
    assert parsed == dt.CheckpointParameters(
        save_every_n_minutes=2.5,
        save_every_n_epochs=None,
        when_busy="skip",
        on_save_error="warn",
        keep_best=3,
        best_metric="val/loss",
        best_mode="max",
        resume="best",
        async_save=False,
    )
