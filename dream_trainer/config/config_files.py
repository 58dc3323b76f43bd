"""Configs from files: YAML, TOML and JSON, merged in order over a config, and configs that other runs have saved."""

from __future__ import annotations

import json
import logging
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dream_trainer.config.serialize import structure
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError

T = TypeVar("T", bound=BaseTrainerConfig)

logger = logging.getLogger(__name__)

SAVED_NAME = "config.json"
RECORD_NAME = "run.json"  # lies beside it in a run's directory
# What a saved config says of its own run: where it lies, how it began, and the record of its callbacks, which are code.
_OF_THAT_RUN = ("project", "group", "experiment", "runs_dir", "callbacks")
_HOW_IT_BEGAN = ("resume", "branch")


def load_config(config: T | type[T], *files: str | Path, **given: Any) -> T:
    """Builds a config from files, merged in order: each says what it changes, and the last word counts.

    What no file names stays as `config` has it. A run's directory, or the `config.json` in it, is taken without what
    it says of that run: its three names, `runs_dir`, what it resumed, and its callbacks.

    Args:
        config: What the files change; of a class, what has no default must be in a file.
        *files: Paths that end in .yaml, .yml, .toml or .json, or directories of runs.
        **given: Fields that count over all files, as the config's constructor takes them.

    Raises:
        ConfigError: A file is missing or cannot be read, a key is unknown (with its place and the nearest name), or a
            value cannot work.
    """
    changes: dict[str, Any] = {}
    for file in map(Path, files):
        of_file = _read(file)
        refuse_unknown_keys(of_file, config, file)
        _merge(changes, of_file, config)
    changes = {name: value for name, value in changes.items() if name not in given}
    return cast(T, _changed(config, changes, given))


def required_fields(cls: Any) -> list[str]:
    """The fields that a dataclass has no default for."""
    return [f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]


def _read(file: Path) -> dict[str, Any]:
    of_a_run = file.is_dir() or (file.name == SAVED_NAME and (file.parent / RECORD_NAME).exists())
    file = file / SAVED_NAME if file.is_dir() else file
    try:
        found = _parse(file, file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8.") from None
    except ConfigError:
        raise
    except ValueError as error:  # what all three parsers raise
        raise ConfigError(f"{file} is not valid: {' '.join(str(error).split())}.") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}. Write fields and their values.")
    return _without_that_run(found, file) if of_a_run else found


def _parse(file: Path, text: str) -> Any:
    if file.suffix in (".yaml", ".yml"):
        return _yaml(text)
    if file.suffix in (".toml", ".json"):
        return tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    raise ConfigError(f"{file} ends in {file.suffix!r}. Use .yaml, .yml, .toml or .json.")


def _yaml(text: str) -> Any:
    """Safe YAML, in which `1e-3` is a number, as everywhere else; YAML 1.1 wants `1.0e-3`."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _without_that_run(saved: dict[str, Any], file: Path) -> dict[str, Any]:
    left_out = [name for name in _OF_THAT_RUN if name in saved]
    kept = {name: value for name, value in saved.items() if name not in _OF_THAT_RUN}
    if isinstance(checkpoints := kept.get("checkpoint_parameters"), dict):
        left_out += [f"checkpoint_parameters.{name}" for name in _HOW_IT_BEGAN if name in checkpoints]
        kept["checkpoint_parameters"] = {n: value for n, value in checkpoints.items() if n not in _HOW_IT_BEGAN}
    logger.info("%s is what a run saved; left out: %s.", file, ", ".join(left_out))
    return kept


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
            raise ConfigError(f"{file} sets {dotted}, and {cls.__name__} has no field {key}. {advice}")
        nested = _nested(start, known[key])
        if nested is None:
            continue
        if isinstance(value, Mapping):
            refuse_unknown_keys(value, nested, file, f"{dotted}.")
        elif value is not None and not _otherfield_types(cls, key) - {NoneType}:
            raise ConfigError(
                f"{file} sets {dotted} to {value!r}, which is no {_class_of(nested).__name__}. "
                f"Write its fields under {dotted}."
            )


def _merge(into: dict[str, Any], changes: Mapping[str, Any], start: Any) -> None:
    """Fields of fields are changed one by one; a dict that is a field's value is replaced whole."""
    known = {f.name: f for f in fields(start)}
    for key, value in changes.items():
        nested = _nested(start, known[key])
        if nested is not None and value is None and NoneType not in _otherfield_types(_class_of(start), key):
            continue  # a section with nothing under it
        if nested is not None and isinstance(value, Mapping):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value, nested)
        else:
            into[key] = value


def _changed(start: Any, changes: Mapping[str, Any], given: Mapping[str, Any], place: str = "") -> Any:
    """A dataclass with `changes`, which are plain, and `given`, which are not; all else is as in `start`."""
    cls = _class_of(start)
    values = dict(given)
    for f in fields(cls):
        if f.name not in changes:
            continue
        value, nested = changes[f.name], _nested(start, f)
        if nested is not None and isinstance(value, Mapping):
            values[f.name] = _changed(nested, value, {}, f"{place}{f.name}.")
        else:
            values[f.name] = structure(value, field_types(cls)[f.name], f"{place}{f.name}")
    if start is cls and (missing := [f"{place}{name}" for name in required_fields(cls) if name not in values]):
        raise ConfigError(f"no file sets {', '.join(missing)}, which {cls.__name__} has no default for.")
    try:
        return cls(**values) if start is cls else replace(start, **values)
    except ConfigError as error:
        if not place:
            raise
        raise ConfigError(f"{place.removesuffix('.')}: {error}") from None
    except Exception as error:  # the user's own validation
        raise ConfigError(f"The data does not fit {place.removesuffix('.') or cls.__name__}: {error}") from error


def _nested(start: Any, field: Field[Any]) -> Any:
    """The dataclass that changes of a field begin from: its value or default, else its type; None if it holds none."""
    if not isinstance(start, type):
        value = getattr(start, field.name)
    else:
        value = field.default if field.default_factory is MISSING else field.default_factory()
    if is_dataclass(value) and not isinstance(value, type):
        return value
    classes = [part for part in _parts(field_types(_class_of(start))[field.name]) if is_dataclass(part)]
    return classes[0] if len(classes) == 1 else None


def _class_of(start: Any) -> Any:
    return start if isinstance(start, type) else type(start)


def _otherfield_types(cls: type, name: str) -> set[Any]:
    """What a field's type allows beside dataclasses."""
    return {part for part in _parts(field_types(cls)[name]) if not is_dataclass(part)}


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type that it is."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields by name, with no annotation left as text."""
    try:
        return get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"the types of {cls.__name__}'s fields cannot be found: {error}. Define {cls.__name__} and what it "
            "names at the top of a module, not in a function or under TYPE_CHECKING."
        ) from None
