"""Configs as plain dicts and back, for checkpoints and loggers, and differences between two runs' configs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from dream_trainer.config.parameter_class import declaring, is_ours, with_new_names
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError
from dream_trainer.events.collection import BaseCallback, CallbackCollection

if TYPE_CHECKING:
    from cattrs import Converter

T = TypeVar("T")

_PLAIN = (str, int, float, bool, type(None))
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType)
_ABSENT = "(absent)"


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass instance as a dict of plain values, for files and loggers; ConfigError for what has no plain form.

    Durations become seconds, enums their values, paths, dtypes, functions and classes their names. Of callbacks it has
    those arguments that are plain and kept as public attributes: what the user configured, not what changes.
    """
    return cast(dict[str, Any], _converter().unstructure(config))


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Builds a config of class `cls` from a result of `to_dict`; missing keys keep their defaults.

    Callbacks hold code and stay at the class's default. Values that do not fit raise ConfigError.
    """
    if issubclass(cls, BaseTrainerConfig):
        data = {key: value for key, value in data.items() if key != "callbacks"}
    return cast(T, structure(data, cls, cls.__name__))


def structure(data: Any, annotation: Any, place: str) -> Any:
    """Builds a value of the type `annotation` from its plain form; errors call it `place`."""
    try:
        return _converter().structure(data, annotation)
    except ConfigError:
        raise
    except Exception as error:
        from cattrs import transform_error

        problems = "; ".join(transform_error(error, path=place, format_exception=_describe))
        raise ConfigError(f"The data does not fit {place}: {problems}.") from error


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Changes between two results of `to_dict`, one line per field: `training_parameters.n_epochs: 3 -> 5`."""
    before, after = ({name: repr(value) for name, value in leaves(data)} for data in (old, new))
    return [
        f"{name}: {before.get(name, _ABSENT)} -> {after.get(name, _ABSENT)}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name, _ABSENT) != after.get(name, _ABSENT)
    ]


def with_later_fields(saved: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """`saved`, from an earlier version, with the defaults of our later fields; a user's stay absent."""
    filled = with_new_names(type(config), saved)
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(then := filled.get(field.name), Mapping) and is_dataclass(value):
            filled[field.name] = with_later_fields(then, value)
        elif field.name not in filled and is_ours(declaring(type(config), field.name)[0]):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if default is not MISSING:
                filled[field.name] = _converter().unstructure(default)
    return filled


def leaves(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a result of `to_dict`; callbacks are numbered per class: `callbacks.EMA 2.decay`."""
    for key, value in data.items():
        if isinstance(value, list | tuple) and value and all(isinstance(element, Mapping) for element in value):
            value = _named(value)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _named(records: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Names records of a list: callbacks by class and number, so that one more shifts no other; others by position."""
    counts: Counter[str] = Counter()
    named: dict[str, Mapping[str, Any]] = {}
    for position, record in enumerate(records):
        name = str(record.get("class", position)).rpartition(".")[2]
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} {counts[name]}"] = record
    return named


@cache
def _converter() -> Converter:
    """cattrs, imported late as it is slow, with this module's rules: by the class a value really has, and strict."""
    from cattrs.preconf.json import make_converter

    converter = make_converter(
        forbid_extra_keys=True,
        unstructure_fallback_factory=lambda cls: _qualified_name if issubclass(cls, _CODE) else _refuse,
        structure_fallback_factory=lambda _: _refuse_to_restore,
    )

    def fields_of(value: Any) -> dict[str, Any]:
        return {f.name: converter.unstructure(getattr(value, f.name)) for f in fields(value)}

    def elements_of(values: Any) -> list[Any]:
        return [converter.unstructure(value) for value in values]

    def callback_record(callback: BaseCallback) -> dict[str, Any]:
        attributes = vars(callback)
        constructors = [vars(part)["__init__"] for part in type(callback).__mro__[:-1] if "__init__" in vars(part)]
        arguments = dict.fromkeys(name for init in constructors for name in inspect.signature(init).parameters)
        names = [name for name in arguments if name in attributes and _is_plain(attributes[name])]
        return {"class": _qualified_name(type(callback))} | {
            name: converter.unstructure(attributes[name]) for name in names
        }

    # Declared types would drop the fields of a subclass, and cannot be resolved where a class is local to a function.
    converter.register_unstructure_hook_func(is_dataclass, fields_of)
    converter.register_unstructure_hook_func(
        lambda cls: isinstance(cls, type) and issubclass(cls, Sequence) and not issubclass(cls, str | bytes),
        elements_of,
    )
    converter.register_unstructure_hook(CallbackCollection, elements_of)
    converter.register_unstructure_hook(BaseCallback, callback_record)
    for plain in _PLAIN:
        converter.register_unstructure_hook(plain, lambda value: value)
    converter.register_unstructure_hook(timedelta, timedelta.total_seconds)
    converter.register_unstructure_hook(torch.dtype, str)

    for plain in (str, int, bool):
        converter.register_structure_hook(plain, _strictly(plain))
    converter.register_structure_hook(float, number := _strictly(float, int))
    converter.register_structure_hook(timedelta, lambda seconds, _: timedelta(seconds=number(seconds, float)))
    converter.register_structure_hook(torch.dtype, _dtype)
    converter.register_structure_hook(CallbackCollection, _refuse_to_restore)
    return converter


def _strictly(cls: type, *others: type) -> Callable[[Any, Any], Any]:
    """Takes a value of `cls` as it is: `bool("False")` is True, so nothing may be converted from text."""

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not cls and type(value) not in others:
            raise TypeError(f"{value!r} is of type {type(value).__name__}, not {cls.__name__}")
        return value

    return structure


def _dtype(value: Any, _: Any) -> torch.dtype:
    names = {str(known): known for known in vars(torch).values() if isinstance(known, torch.dtype)}
    if value not in names:
        raise TypeError(f"{value!r} is not a dtype such as 'torch.float32'")
    return names[value]


def _describe(error: BaseException, expected: type | None) -> str:
    """Describes one problem; cattrs knows the place and adds it."""
    from cattrs.errors import ForbiddenExtraKeysError
    from cattrs.v import format_exception

    if isinstance(error, ForbiddenExtraKeysError):
        return f"unknown keys {', '.join(sorted(error.extra_fields))}"
    if isinstance(error, ConfigError | TypeError):
        return str(error).rstrip(".")
    return format_exception(error, expected)


def _refuse(value: Any) -> Any:
    raise ConfigError(
        f"{value!r} in a config is of type {type(value).__name__}, which has no plain form to record. "
        "Use numbers, strings, booleans, enums, paths, durations, dtypes, dataclasses or containers of them."
    )


def _refuse_to_restore(value: Any, _: Any) -> Any:
    raise TypeError(f"{value!r} is only the record of a value that has no plain form; set this field in code instead")


def _qualified_name(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(element) for element in value)
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return isinstance(value, _PLAIN)
