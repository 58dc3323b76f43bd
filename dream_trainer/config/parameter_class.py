"""The decorator of parameter classes: frozen dataclasses whose mistakes are answered with what would be right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field
from difflib import get_close_matches
from typing import Any, TypeVar, dataclass_transform

from dream_trainer.errors import ConfigError

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def parameters(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass.

    An unknown field raises ConfigError with the nearest name, an assignment FrozenInstanceError with how to make a
    changed copy. Lists and dicts of another library, such as hydra's, become Python's before they are checked.
    """
    check: Callable[[T], None] = vars(cls).get("__post_init__", lambda self: None)

    def __post_init__(self: T) -> None:
        for name, value in vars(self).items():
            if (plain := _plain(value)) is not value:
                object.__setattr__(self, name, tuple(plain) if isinstance(plain, list) else plain)
        check(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    made = dataclass(frozen=True, kw_only=True)(cls)
    made.__new__ = _new  # type: ignore[method-assign]
    made.__setattr__ = _refuse_to_change  # type: ignore[method-assign]
    return made


def _plain(value: Any) -> Any:
    """`value`, or as Python's own dict or list if it is another mapping or sequence."""
    if isinstance(value, str | bytes | dict | list | tuple | range):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, Sequence) else value


def _new(cls: type[T], *args: Any, **fields: Any) -> T:
    refuse_unknown_fields(cls, fields)
    return object.__new__(cls)


def _refuse_to_change(self: object, name: str, value: Any) -> None:
    refuse_unknown_fields(type(self), {name: value})
    cls = type(self).__name__
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in cls).removeprefix("_")
    raise FrozenInstanceError(
        f"{cls}.{name} cannot be changed. Make a changed copy, dataclasses.replace({words}, {name}=...), and build the "
        "trainer's config with it."
    )


def refuse_unknown_fields(cls: type, fields: dict[str, Any]) -> None:
    """Raises ConfigError if the constructor of `cls` does not take one of `fields`, with the nearest name."""
    constructor: Any = cls.__init__  # type: ignore[misc]
    accepted = dict(list(inspect.signature(constructor).parameters.items())[1:])
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for name in fields:
        if name not in accepted:
            known = list(accepted)
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            begins = [field_name for field_name in known if field_name.startswith(name)]
            advice = f"Did you mean {[*begins, *near][0]}?" if begins or near else f"It has {', '.join(known)}."
            raise ConfigError(f"{cls.__name__} has no field {name}. {advice}")
