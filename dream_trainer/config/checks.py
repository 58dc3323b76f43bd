"""What several configs check of one value, with messages of one form: what is wrong, then what would be right."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dream_trainer.errors import ConfigError


def check_integer(name: str, value: object, *, minimum: int, hint: str = "") -> None:
    """Raises ConfigError unless `value` is an integer of at least `minimum`; `True` is not one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not an integer. Use an integer of at least {minimum}.{hint}")
    if value < minimum:
        raise ConfigError(f"{name}={value} is too small. Use an integer of at least {minimum}.{hint}")


def check_positive(name: str, value: object, *, hint: str = "") -> None:
    """Raises ConfigError unless `value` is a number above zero; infinity is one, NaN is not."""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or value <= 0:
        raise ConfigError(f"{name}={value!r} is not a number above zero. Use a positive number.{hint}")


def check_boolean(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not a boolean. Use True or False.")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not known. Use {spell(repr(choice) for choice in choices)}.")


def spell(values: Iterable[object]) -> str:
    """`1, 2, 4 or 8`: the valid values as a message says them."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
