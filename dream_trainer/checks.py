"""Checks of single values, with errors of one form: the name, its value and what to use instead."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import PurePath
from typing import TypeVar

from dream_trainer.errors import ConfigError, DataError

T = TypeVar("T")


def check_integer(name: str, value: object, *, minimum: int, hint: str = "") -> None:
    """Raises ConfigError unless `value` is an integer of at least `minimum`; `True` is not one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not an integer. Use an integer of at least {minimum}.{hint}")
    if value < minimum:
        raise ConfigError(f"{name}={value} is too small. Use an integer of at least {minimum}.{hint}")


def check_count(name: str, value: object, *, hint: str) -> None:
    """Raises DataError unless `value` is an integer above zero."""
    if not isinstance(value, int) or value < 1:
        raise DataError(f"{name}={value!r} is not a positive integer. {hint}")


def check_positive(name: str, value: object, *, hint: str = "") -> None:
    """Raises ConfigError unless `value` is a number above zero; infinity is one, NaN is not."""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or value <= 0:
        raise ConfigError(f"{name}={value!r} is not a number above zero. Use a positive number.{hint}")


def check_between(
    name: str, value: object, low: float, high: float = math.inf, *, below: bool = False, hint: str = ""
) -> None:
    """Raises ConfigError unless `value` is a number from `low` to `high`, `high` itself not if `below`."""
    is_inside = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (low <= value < high or (value == high and not below))
    )
    if is_inside:
        return
    span = f"from {low} to {'below ' if below else ''}{high}" if high < math.inf else f"of at least {low}"
    raise ConfigError(f"{name}={value!r} is not a number {span}. Use one that is.{hint}")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not known. Use {spell(repr(choice) for choice in choices)}.")


def check_name(name: str, value: object, *, example: str, hint: str = "") -> None:
    """Raises ConfigError unless `value` is a string with something in it."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={value!r} is not a name. Use a string, such as {name}={example!r}.{hint}")


def check_pattern(name: str, pattern: object) -> None:
    """Raises ConfigError unless `pattern` is a regular expression with something in it."""
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"{name}={pattern!r} is not a pattern. Use a regular expression on names.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{name}={pattern!r} is not a regular expression ({error}). Escape literal characters with a backslash."
        ) from None


def check_directory(name: str, value: object, *, hint: str = "") -> None:
    """Raises ConfigError unless `value` is the path of a directory in a file system of this machine, or None."""
    if not isinstance(value, str | PurePath | None) or value == "":
        raise ConfigError(f"{name}={value!r} is not a directory. Use its path.{hint}")
    if value is not None and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(value)):
        raise ConfigError(
            f"{name}={str(value)!r} is not in a file system, as it has to be. Use a local or mounted directory."
        )


def check_names(name: str, value: object, *, example: str, are_patterns: bool = False, hint: str = "") -> None:
    """Raises ConfigError unless `value` is a sequence of strings; a string would be taken letter by letter."""
    if isinstance(value, str):
        raise ConfigError(f"{name}={value!r} is a string. Use a tuple of strings: {name}=({value!r},).{hint}")
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{name}={value!r} is not a tuple of strings. Use such as {name}=({example!r},).{hint}")
    for item in value if are_patterns else ():
        check_pattern(name, item)


def check_instance(name: str, value: object, cls: type, *, hint: str = "") -> None:
    """Raises ConfigError unless `value` is an instance of `cls`."""
    if not isinstance(value, cls):
        wanted = {bool: "True or False", str: "a string"}.get(cls, f"{cls.__name__}(...)")
        raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}. Use {wanted}.{hint}")


def refuse(condition: object, message: str, kind: type[Exception] = ConfigError) -> None:
    """Raises an error of `kind` if `condition` holds."""
    if condition:
        raise kind(message)


def all_of(checks: Iterable[Callable[[], T]]) -> list[T]:
    """What each of `checks` returns; the ConfigErrors that they raise come as one error, which lists them."""
    results, errors = [], []
    for check in checks:
        try:
            results.append(check())
        except ConfigError as error:
            errors.append(error)
    if errors:
        lines = [f"{len(errors)} errors in the config:", *(f"- {error}" for error in errors)]
        raise errors[0] if len(errors) == 1 else ConfigError("\n".join(lines))
    return results


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The first of `known` that begins with `name`, or else the most similar one; None if none is similar."""
    known = [*known]
    begins = [word for word in known if name and word.startswith(name)]
    return next(iter(begins or get_close_matches(name, known, n=1)), None)


def did_you_mean(name: str, known: Iterable[str], *, place: str = "") -> str:
    """`Did you mean n_epochs?`, or all of `known` if none of them is similar; `place` is put before the name."""
    known = [*known]
    near = nearest(name, known)
    return f"Did you mean {place}{near}?" if near else f"Use {spell(known)}."


def spell(values: Iterable[object]) -> str:
    """`1, 2, 4 or 8`: the valid values as a message says them."""
    words = [str(value) for value in values]
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} or {words[-1]}"


def listed(names: Sequence[str], most: int) -> str:
    """The first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
