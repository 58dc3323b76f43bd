"""What is a number for a config, at the edges: booleans, NaN, infinities, limits themselves."""

import math
import re
from functools import partial
from typing import Any

import pytest

from dream_trainer.checks import check_between, check_integer, check_positive
from dream_trainer.errors import ConfigError

NAN, INF = math.nan, math.inf


NO_NUMBERS = [True, False, "1", None, NAN]


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (partial(check_integer, minimum=0), [0, 10**30], [-1, 1.0, INF, *NO_NUMBERS]),
        (partial(check_integer, minimum=1), [1], [0]),
        (check_positive, [1, 0.5, 1e-300, INF], [0, 0.0, -0.0, -1e-300, -INF, *NO_NUMBERS]),
        (
            partial(check_between, low=0, high=1),
            [0, 0.5, 1, 1.0, math.nextafter(1, 0)],
            [-1e-300, math.nextafter(1, 2), INF, -INF, *NO_NUMBERS],
        ),
        (partial(check_between, low=0, high=1, below=True), [0, math.nextafter(1, 0)], [1, 1.0, *NO_NUMBERS]),
        (partial(check_between, low=0, high=INF), [INF], []),
        (partial(check_between, low=0, high=INF, below=True), [1], [INF]),
    ],
    ids=["from 0", "from 1", "positive", "to 1", "below 1", "without a limit", "finite"],
)
def test_numbers_are_what_they_are_at_the_edges(check: Any, right: list[object], wrong: list[object]) -> None:
    for value in right:
        check("field", value)
    for value in wrong:
        with pytest.raises(ConfigError, match=re.escape(f"field={value!r} is ")):
            check("field", value)
