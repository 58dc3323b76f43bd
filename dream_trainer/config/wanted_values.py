"""What a field takes, in words: for the error of a value that does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from dream_trainer.checks import spell

_WORDS: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    NoneType: ("null", "null"),
    timedelta: ("a number of seconds", "numbers of seconds"),
}


def wanted(annotation: Any) -> str:
    """Such as "an integer or null" for `int | None`."""
    return spell(dict.fromkeys(_choices(annotation, plural=False)))


def takes(annotation: Any, cls: type) -> bool:
    """Whether a type is `cls`, or a union with it or with choices of it."""
    return any(
        part is cls or (get_origin(part) is Literal and any(type(choice) is cls for choice in get_args(part)))
        for part in members(annotation)
    )


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type that it is."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def is_sequence(annotation: Any) -> bool:
    """Whether a type is a list, a tuple or the like."""
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and (origin is Sequence or issubclass(origin, list | tuple | set | frozenset))


def _choices(annotation: Any, *, plural: bool) -> list[str]:
    found: list[str] = []
    for part in members(annotation):
        if get_origin(part) is Literal:
            found += [repr(choice) for choice in get_args(part)]
        elif isinstance(part, type) and issubclass(part, Enum):
            found += [repr(member.value) for member in part]
        else:
            found.append(_word(part, plural=plural))
    return found


def _word(part: Any, *, plural: bool) -> str:
    origin, arguments = get_origin(part) or part, get_args(part)
    if part in _WORDS:
        return _WORDS[part][plural]
    if isinstance(origin, type) and issubclass(origin, PurePath):
        return "paths" if plural else "a path"
    if is_sequence(part):
        word = "lists" if plural else "a list"
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            return f"{word} of {len(arguments)}: {', '.join(wanted(argument) for argument in arguments)}"
        return f"{word} of {spell(_choices(arguments[0], plural=True))}" if arguments else word
    if isinstance(origin, type) and issubclass(origin, Mapping):
        values = f" whose values are {spell(_choices(arguments[1], plural=True))}" if arguments else ""
        return f"{'names' if plural else 'names and values'}{values}"
    if is_dataclass(part):
        return f"the fields of {getattr(part, '__name__', part)}"
    return getattr(part, "__name__", str(part))
