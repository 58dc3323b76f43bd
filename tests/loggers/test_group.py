"""LoggerGroup and the table of loggers: what is found by name, and what is refused."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from dream_trainer.config import logger_parameters
from tests.api import ConfigError, CSVLogger, HookError, Logger, LoggerGroup, LoggerParameters, Stamp, check_loggers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (CSVLogger(), "<.*CSVLogger.*>"),
        (None, "None"),
        ([CSVLogger(), CSVLogger], ".*<class .*CSVLogger'>]"),
        (["csv"], r"\['csv'\]"),
    ],
)
def test_what_is_no_list_of_loggers_is_refused_with_what_to_write(given: Any, message: str) -> None:
    with pytest.raises(HookError, match=f"configure_loggers returned {message}, which is no list .* Return a list of"):
        LoggerGroup(given, lambda key, text: None, strict=False)


class Spoken(Logger):
    """As another package may bring it."""

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None: ...

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None: ...


class Needy(Spoken):
    requires = ("a_package_that_nobody_has",)


def installed(monkeypatch: pytest.MonkeyPatch, **places: str) -> None:
    """As if packages with these entry points were installed."""
    entries = [EntryPoint(name, place, "dream_trainer.loggers") for name, place in places.items()]
    monkeypatch.setattr(logger_parameters, "entry_points", lambda group: entries)


def test_a_logger_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, spoken=f"{__name__}:Spoken", csv=f"{__name__}:Spoken")
    assert check_loggers(LoggerParameters(loggers=("csv", "spoken"))) == [CSVLogger, Spoken]
    with pytest.raises(ConfigError, match=r"loggers='spokn' is not known\. Use 'console', .* or 'spoken'\."):
        LoggerParameters(loggers=("spokn",))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere.at.all:Spoken", r'"mine" is nowhere.at.all:Spoken, which cannot be loaded \(No module'),
        (f"{__name__}:NotThere", r"NotThere, which cannot be loaded .* Install what it needs"),
        (f"{__name__}:installed", r"installed, which is no class of loggers\. Derive it from Logger\."),
        (f"{__name__}:Needy", r'"mine", whose package a_package_that_nobody_has is not installed'),
    ],
)
def test_an_entry_point_without_a_logger_is_named(place: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, mine=place)
    with pytest.raises(ConfigError, match=message):
        check_loggers(LoggerParameters(loggers=("mine",)))
