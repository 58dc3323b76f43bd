"""Configs from files: YAML, TOML and JSON, merged in order over a config, and configs that other runs have saved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

from dream_trainer.config.saved_config import read_changes
from dream_trainer.config.serialize import structure
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.config.wanted_values import is_sequence, members, takes, wanted
from dream_trainer.errors import ConfigError

T = TypeVar("T", bound=BaseTrainerConfig)


class _Set(NamedTuple):
    """A value that a file sets."""

    value: Any
    file: Path


def load_config(config: T | type[T], *files: str | Path, **given: Any) -> T:
    """Builds a config from files, merged in order: each says what it changes, and the last word counts.

    What no file names stays as `config` has it. A run's directory, or a copy of the `config.json` in it, is taken
    without what it says of that run: its three names, `runs_dir`, what it resumed, and its callbacks.

    Args:
        config: What the files change; of a class, what has no default must be in a file.
        *files: Paths that end in .yaml, .yml, .toml or .json, or directories of runs.
        **given: Fields that count over all files, as the config's constructor takes them.

    Raises:
        ConfigError: A file is missing or cannot be read, a key is unknown (with its place and the nearest name) or
            stands twice, or a value cannot work; with the file.
    """
    changes: dict[str, Any] = {}
    for path in map(Path, files):
        file, of_file = read_changes(path)
        refuse_unknown_keys(of_file, config, file)
        _merge(changes, of_file, config, file)
    changes = {name: value for name, value in changes.items() if name not in given}
    return cast(T, _changed(config, changes, given))


def required_fields(cls: Any) -> list[str]:
    """The fields that a dataclass has no default for."""
    return [f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]


def refuse_unknown_keys(changes: Mapping[str, Any], start: Any, file: Path, place: str = "") -> None:
    """Raises ConfigError for a key that is no field, with its dotted place, the file and the nearest name."""
    cls = _class_of(start)
    known = {f.name: f for f in fields(cls) if f.init}
    for key, value in changes.items():
        dotted = f"{place}{key}"
        if key == "callbacks" and not place:
            raise ConfigError(f"{file} sets callbacks, which are code. Set them in the script.")
        if key not in known:
            near = get_close_matches(str(key), known, n=1, cutoff=0.5)
            advice = f"Did you mean {place}{near[0]}?" if near else f"There is {', '.join(known)}."
            section, _, rest = str(key).partition(".")
            if rest and section in known:
                advice = f"A dot does not nest: write {rest} under {place}{section}, as in {section}: {{{rest}: ...}}."
            raise ConfigError(f"{file} sets {dotted}, and {cls.__name__} has no field {key}. {advice}")
        nested = section_of(start, known[key])
        if nested is None:
            continue
        if isinstance(value, Mapping):
            refuse_unknown_keys(value, nested, file, f"{dotted}.")
        elif value is not None and not _other_types(cls, key) - {NoneType}:
            raise ConfigError(
                f"{file} sets {dotted} to {value!r}, which is no {_class_of(nested).__name__}. "
                f"Write its fields under {dotted}."
            )


def _merge(into: dict[str, Any], changes: Mapping[str, Any], start: Any, file: Path) -> None:
    """Fields of fields are changed one by one, in dicts within dicts; a field's value is replaced whole."""
    known = {f.name: f for f in fields(start)}
    for key, value in changes.items():
        nested = section_of(start, known[key])
        if nested is not None and value is None and NoneType not in _other_types(_class_of(start), key):
            continue  # a section with nothing under it
        if nested is not None and isinstance(value, Mapping):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value, nested, file)
        else:
            into[key] = _Set(value, file)


def _changed(start: Any, changes: Mapping[str, Any], given: Mapping[str, Any], place: str = "") -> Any:
    """A dataclass with `changes`, of files, and `given`, which are not plain; all else is as in `start`."""
    cls = _class_of(start)
    values = dict(given)
    for f in fields(cls):
        if f.name not in changes:
            continue
        change = changes[f.name]
        if isinstance(change, _Set):
            values[f.name] = _value(change, field_types(cls)[f.name], f"{place}{f.name}")
        else:
            values[f.name] = _changed(section_of(start, f), change, {}, f"{place}{f.name}.")
    if start is cls and (missing := [f"{place}{name}" for name in required_fields(cls) if name not in values]):
        raise ConfigError(f"no file sets {', '.join(missing)}, which {cls.__name__} has no default for.")
    try:
        return cls(**values) if start is cls else replace(start, **values)
    except Exception as error:  # ours and the user's own validation
        section = place.removesuffix(".")
        said = str(error) if isinstance(error, ConfigError) else f"the data does not fit {cls.__name__}: {error}"
        files = _files_named(said, changes)
        raise ConfigError(": ".join([*files, *([section] if section else []), said])) from error


def _value(change: _Set, annotation: Any, dotted: str) -> Any:
    """The field's value, of its type."""
    value, advice = change.value, f"It takes {wanted(annotation)}."
    is_text = isinstance(value, str) and not takes(annotation, str)
    if is_text and any(is_sequence(part) for part in members(annotation)):  # it would be taken letter by letter
        advice += f" Write [{value}]."
    else:
        try:
            return structure(value, annotation, dotted)
        except ConfigError as error:
            places = [place for place in re.findall(r" @ (.+?)(?=;|\.?$)", str(error)) if place != dotted]
            unknown = re.findall(r"unknown keys .+?(?= @ )", str(error))
        if places:
            advice += f" Wrong is {', '.join(places)}{''.join(f' ({keys})' for keys in unknown)}."
        if is_text and re.fullmatch(r"[-+.0-9eE_]+", value):
            advice += " Leave the quotes out."
    raise ConfigError(f"{change.file} sets {dotted} to {value!r}. {advice}")


def _files_named(said: str, changes: Mapping[str, Any]) -> list[str]:
    """The files that set what a message names; all of them if it names none of their fields."""
    changed = list(_leaves(changes))
    named = [change for name, change in changed if re.search(rf"\b{re.escape(name)}\b", said)]
    return list(dict.fromkeys(str(change.file) for change in named or [change for _, change in changed]))


def _leaves(changes: Mapping[str, Any]) -> Iterator[tuple[str, _Set]]:
    for name, change in changes.items():
        if isinstance(change, _Set):
            yield name, change
        else:
            yield from _leaves(change)


def section_of(start: Any, field: Field[Any]) -> Any:
    """The dataclass that changes of a field begin from: its value or default, else its type; None if it holds none."""
    if not isinstance(start, type):
        value = getattr(start, field.name)
    else:
        value = field.default if field.default_factory is MISSING else field.default_factory()
    if is_dataclass(value) and not isinstance(value, type):
        return value
    classes = [part for part in members(field_types(_class_of(start))[field.name]) if is_dataclass(part)]
    return classes[0] if len(classes) == 1 else None


def _class_of(start: Any) -> Any:
    return start if isinstance(start, type) else type(start)


def _other_types(cls: type, name: str) -> set[Any]:
    """What a field's type allows beside dataclasses."""
    return {part for part in members(field_types(cls)[name]) if not is_dataclass(part)}


def field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields by name, with no annotation left as text."""
    try:
        return get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"the types of {cls.__name__}'s fields cannot be found: {error}. Define {cls.__name__} and what it "
            "names at the top of a module, not in a function or under TYPE_CHECKING."
        ) from None
