"""CheckpointParameters: what cannot work is an error that names the field, its value and what to do."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

import dream_trainer as dt
from dream_trainer.config.command_line import parse
from dream_trainer.errors import ConfigError
from tests.trainer.saves import make_config

METRIC = {"best_metric": "val/loss"}


def test_by_default_each_epoch_and_the_end_are_saved_and_everything_is_kept() -> None:
    parameters = dt.CheckpointParameters()
    assert parameters.saves
    assert {field.name: getattr(parameters, field.name) for field in fields(parameters)} == {
        "directory": None,
        "save_every_n_steps": None,
        "save_every_n_minutes": None,
        "save_every_n_epochs": 1,
        "save_on_best": False,
        "save_at_end": True,
        "save_on_exception": True,
        "local_directory": None,
        "save_local_every_n_steps": None,
        "save_frozen": True,
        "async_save": True,
        "when_busy": "wait",
        "on_save_error": "raise",
        "keep_last": None,
        "keep_every_n_steps": None,
        "keep_best": None,
        "best_metric": None,
        "best_mode": None,
        "resume": "auto",
        "branch": dt.BranchParameters(),
        "init_from": None,
        "init_renames": {},
        "init_strict": True,
    }


@pytest.mark.parametrize(
    "field", ["save_every_n_steps", "save_every_n_epochs", "keep_last", "keep_every_n_steps", "keep_best"]
)
@pytest.mark.parametrize("value", [0, -3, 1.5, True, "2"])
def test_a_count_is_a_positive_integer(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{field}={value!r}.* None "):
        dt.CheckpointParameters(**METRIC, **{field: value})


def test_local_checkpoints_need_a_directory_of_the_host() -> None:
    with pytest.raises(ConfigError, match=r"save_local_every_n_steps=10 does not say where. Set local_directory"):
        dt.CheckpointParameters(save_local_every_n_steps=10)
    with pytest.raises(ConfigError, match=r"save_local_every_n_steps=0"):
        dt.CheckpointParameters(save_local_every_n_steps=0, local_directory="/dev/shm")
    with pytest.raises(ConfigError, match=r"local_directory='s3://bucket/runs'"):
        dt.CheckpointParameters(local_directory="s3://bucket/runs")


@pytest.mark.parametrize("value", ["", 3])
def test_the_directory_is_a_path(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"directory={value!r} is not "):
        dt.CheckpointParameters(directory=value)


def test_the_directory_may_be_in_an_object_store_and_has_no_credentials_in_it() -> None:
    assert dt.CheckpointParameters(directory="s3://bucket/runs").directory == "s3://bucket/runs"
    with pytest.raises(ConfigError, match=r"checkpoint_parameters.directory: https: is no place"):
        dt.CheckpointParameters(directory="https://bucket/runs")
    with pytest.raises(ConfigError, match=r"checkpoint_parameters.directory: .*credentials") as raised:
        dt.CheckpointParameters(directory="s3://key:secret@bucket/runs")
    assert "secret@" not in str(raised.value)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "1", True])
def test_minutes_are_a_positive_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"save_every_n_minutes={value!r}"):
        dt.CheckpointParameters(save_every_n_minutes=value)


@pytest.mark.parametrize("value", [1, 0.5, 1e-6])
def test_any_positive_number_of_minutes_works(value: float) -> None:
    assert dt.CheckpointParameters(save_every_n_minutes=value).save_every_n_minutes == value


@pytest.mark.parametrize(
    ("field", "choices"),
    [("when_busy", ("wait", "skip")), ("on_save_error", ("raise", "warn")), ("best_mode", ("min", "max"))],
)
def test_a_choice_is_one_of_those_listed(field: str, choices: tuple[str, str]) -> None:
    for choice in choices:
        assert getattr(dt.CheckpointParameters(**{field: choice}), field) == choice
    with pytest.raises(ConfigError, match=rf"{field}='other'.*{choices[0]}.*{choices[1]}"):
        dt.CheckpointParameters(**{field: "other"})


@pytest.mark.parametrize("options", [{"save_on_best": True}, {"keep_best": 2}, {"resume": "best"}], ids=str)
@pytest.mark.parametrize("metric", [None, ""])
def test_what_goes_by_a_metric_needs_its_name(options: dict[str, Any], metric: str | None) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(ConfigError, match=rf"{name}={value!r} does not say by which metric. Set best_metric"):
        dt.CheckpointParameters(best_metric=metric, **options)
    dt.CheckpointParameters(best_metric="val/loss", **options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_at_end": "no"},
        {"async_save": "false"},
        {"save_on_best": 1},
        {"init_strict": None},
        {"best_metric": ["val/loss"]},
        {"init_from": 3},
    ],
)
def test_a_value_of_another_type_is_named_and_not_taken_for_what_it_is_not(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"^{name}={re.escape(repr(value))} is not a (boolean|string). Use "):
        dt.CheckpointParameters(**wrong)


@pytest.mark.parametrize("resume", ["auto", "latest", 0, 7, "runs/a/step_00000007", None])
def test_what_may_be_resumed(resume: Any) -> None:
    assert dt.CheckpointParameters(resume=resume).resume == resume


@pytest.mark.parametrize("resume", ["", True, False, -1, 2.0])
def test_what_may_not_be_resumed(resume: Any) -> None:
    with pytest.raises(ConfigError, match=rf"resume={resume!r}.*\"latest\""):
        dt.CheckpointParameters(resume=resume)


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


def test_the_parameters_do_not_change_themselves() -> None:
    with pytest.raises(FrozenInstanceError):
        dt.CheckpointParameters().keep_last = 3


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
