"""LoggerGroup: what it refuses of the loggers it is given."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api import CSVLogger, HookError, LoggerGroup


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (CSVLogger(), r"configure_loggers returned a CSVLogger, not a list\. Return a list of loggers"),
        (None, r"configure_loggers returned None, not a list\. Return a list of loggers"),
        ([CSVLogger(), CSVLogger], r"configure_loggers returned CSVLogger in its list, a class\. Write CSVLogger\(\)"),
        (["csv"], r"configure_loggers returned 'csv' in its list, which is not a logger\. Derive its class from"),
    ],
)
def test_what_is_no_list_of_loggers_is_refused_with_what_to_write(given: Any, message: str) -> None:
    with pytest.raises(HookError, match=message):
        LoggerGroup(given, lambda key, text: None, strict=False)


def test_any_sequence_of_loggers_will_do() -> None:
    assert not LoggerGroup((CSVLogger(),), lambda key, text: None, strict=False).is_open
