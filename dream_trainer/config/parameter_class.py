"""The decorator of parameter classes: frozen dataclasses that check each field by its type when they are built.

Limits stand in the type: `n_epochs: NonNegativeInt | None`, or any `check(name, value, *, hint)` in `Annotated`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass
from functools import cache, partial, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from dream_trainer.checks import (
    all_of,
    check_choice,
    check_directory,
    check_instance,
    check_integer,
    check_positive,
    did_you_mean,
    refuse,
    spell,
)
from dream_trainer.errors import ConfigError

T = TypeVar("T")
_types = cache(get_type_hints)
PositiveInt = Annotated[int, partial(check_integer, minimum=1)]
NonNegativeInt = Annotated[int, partial(check_integer, minimum=0)]
PositiveFloat = Annotated[float, check_positive]
Directory = Annotated[str, check_directory]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def parameters(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass whose fields are checked, by type and then `__post_init__`."""
    check: Callable[[T], None] = getattr(cls, "__post_init__", lambda self: None)

    def __post_init__(self: T) -> None:
        for name, value in vars(self).items():
            if (plain := _plain(value)) is not value:
                object.__setattr__(self, name, tuple(plain) if isinstance(plain, list) else plain)
        check_fields(self, made)
        check(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    made = dataclass(frozen=True, kw_only=True)(cls)
    initialise = made.__init__

    @wraps(initialise)
    def __init__(self: T, **given: Any) -> None:
        named = with_new_names(made, given)
        refuse_unknown_fields(made, named)
        initialise(self, **named)

    made.__init__ = __init__  # type: ignore[assignment, method-assign]
    made.__setattr__ = _refuse_to_change  # type: ignore[method-assign]
    return made


def _refuse_to_change(self: object, name: str, value: Any) -> None:
    raise FrozenInstanceError(
        f"{type(self).__name__}.{name} cannot be changed. Make a changed copy, dataclasses.replace(..., {name}=...), "
        "and build the trainer's config with it."
    )


def check_fields(instance: object, cls: type) -> None:
    """Raises ConfigError for the fields of the dataclass `cls` whose values in `instance` their types exclude."""
    types = _types(cls, include_extras=True)
    all_of(partial(check_value, f.name, getattr(instance, f.name), types[f.name]) for f in fields(cls))


def with_new_names(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with current field names instead of the old ones in the class's `_renamed`."""
    renamed: Mapping[str, str] = vars(cls).get("_renamed", {})
    named: dict[str, Any] = {}
    for name, value in given.items():
        new = renamed.get(name, name)
        if new in named or (new != name and new in given):
            raise ConfigError(f"{name} is another name of {new}, and both are set. Only set {new}.")
        named[new] = value
    return named


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type that it is."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def declaring(cls: type, name: str) -> list[type]:
    """The classes that declare a field, the nearest first."""
    return [part for part in cls.__mro__ if name in own_annotations(part)]


def is_ours(cls: type) -> bool:
    """Whether a class is the framework's and not a user's; recipes are written as users' classes are."""
    return cls.__module__.startswith("dream_trainer.") and not cls.__module__.startswith("dream_trainer.recipes.")


def own_annotations(cls: type) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(cls)


def check_value(name: str, value: object, annotation: Any) -> None:
    """Raises ConfigError for a value that its field's type excludes; types that no rule is for are not checked."""
    choices: list[Any] = []
    kinds: list[Any] = []
    for part in members(annotation):
        if part is NoneType:
            choices.append(None)
        elif get_origin(part) is Literal:
            choices += get_args(part)
        else:
            kinds.append(part)
    if not kinds:
        check_choice(name, value, choices)
    if len(kinds) != 1 or any(type(value) is type(choice) and value == choice for choice in choices):
        return
    hint = f" {spell(map(repr, choices))} is also valid." if choices else ""
    kind, origin, arguments = kinds[0], get_origin(kinds[0]), get_args(kinds[0])
    if origin is Annotated:
        for check in filter(callable, arguments[1:]):
            check(name, value, hint=hint)
    elif kind in (bool, str) or (isinstance(kind, type) and is_dataclass(kind)):
        check_instance(name, value, kind, hint=hint)
    elif origin in (Mapping, dict):
        items = value.items() if isinstance(value, Mapping) else [(None, None)]
        is_wrong = not all(isinstance(key, str) for key, _ in items)
        refuse(is_wrong, f"{name}={value!r} is not a dict with strings as keys. Use {name}={{'name': ...}}.{hint}")
        for key, item in items:
            check_value(f"{name}[{key!r}]", item, arguments[1])


def _plain(value: Any) -> Any:
    """`value`, or as Python's own dict or list if it is another mapping or sequence."""
    if isinstance(value, str | bytes | dict | list | tuple | range):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, Sequence) else value


def refuse_unknown_fields(cls: type, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError if the constructor of `cls` does not take one of `fields`, with the nearest name."""
    constructor: Any = cls.__init__  # type: ignore[misc]
    accepted = dict(list(inspect.signature(constructor).parameters.items())[1:])
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for name in fields:
        if name not in accepted:
            raise ConfigError(f"{cls.__name__} has no field {name}. {did_you_mean(name, accepted)}")
