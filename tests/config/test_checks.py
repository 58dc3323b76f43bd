"""What is a number for a config, at the edges: booleans, NaN, infinities, limits themselves."""

import math
from collections.abc import Callable

import pytest

from dream_trainer.checks import check_between, check_integer, check_positive
from dream_trainer.errors import ConfigError

NAN, INF = math.nan, math.inf


def accepts(check: Callable[..., None], value: object, *limits: float, **options: object) -> bool:
    try:
        check("field", value, *limits, **options)
    except ConfigError as error:
        return f"field={value!r}" not in str(error)
    return True


@pytest.mark.parametrize(
    ("value", "minimum", "is_right"),
    [(0, 0, True), (1, 1, True), (-1, 0, False), (0, 1, False), (10**30, 1, True)]
    + [(value, 0, False) for value in (True, False, 1.0, "1", None, NAN, INF)],
)
def test_an_integer_is_no_boolean_and_may_be_the_minimum(value: object, minimum: int, is_right: bool) -> None:
    assert accepts(check_integer, value, minimum=minimum) is is_right


@pytest.mark.parametrize("value", [1, 0.5, 1e-300, INF])
def test_a_positive_number_may_be_tiny_or_infinite(value: float) -> None:
    assert accepts(check_positive, value)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -1e-300, -INF, NAN, True, False, "1", None])
def test_a_positive_number_is_above_zero_and_no_boolean(value: object) -> None:
    assert not accepts(check_positive, value)


@pytest.mark.parametrize(
    ("value", "in_closed", "in_open"),
    [(0, True, True), (0.5, True, True), (1, True, False), (1.0, True, False), (math.nextafter(1, 0), True, True)]
    + [(value, False, False) for value in (-1e-300, math.nextafter(1, 2), NAN, INF, -INF, True, False, "0.5", None)],
)
def test_a_number_between_two_may_be_the_lower_or_the_upper(value: object, in_closed: bool, in_open: bool) -> None:
    assert accepts(check_between, value, 0, 1) is in_closed
    assert accepts(check_between, value, 0, 1, below=True) is in_open


def test_without_an_upper_limit_infinity_is_inside() -> None:
    assert accepts(check_between, INF, 0, INF)
    assert not accepts(check_between, INF, 0, INF, below=True)
