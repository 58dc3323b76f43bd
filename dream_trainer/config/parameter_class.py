"""The decorator of parameter classes: frozen dataclasses whose mistakes are answered with what would be right."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, dataclass, field
from difflib import get_close_matches
from typing import Any, TypeVar, dataclass_transform

from dream_trainer.errors import ConfigError

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def parameters(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass.

    An unknown field raises ConfigError with the nearest name, an assignment FrozenInstanceError with how to make a
    changed copy.
    """
    made = dataclass(frozen=True, kw_only=True)(cls)
    made.__new__ = _new  # type: ignore[method-assign]
    made.__setattr__ = _refuse_to_change  # type: ignore[method-assign]
    return made


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
