"""Configs from files: YAML, TOML and JSON, merged in order over a config, and configs that other runs have saved."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from dream_trainer.config.serialize import from_dict, to_dict
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError

T = TypeVar("T", bound=BaseTrainerConfig)

SAVED_NAME = "config.json"
# What a saved config says of its own run: where it lies, how it began, and the record of its callbacks, which are code.
_OF_THAT_RUN = ("project", "group", "experiment", "runs_dir", "callbacks")


def load_config(config: T | type[T], *files: str | Path, **given: Any) -> T:
    """Builds a config from files, merged in order: each says what it changes, and the last word counts.

    A run's `config.json`, or its directory, is taken without what it says of that run: its three names, `runs_dir`,
    what it resumed, and its callbacks.

    Args:
        config: What the files change; of a class, what has no default must be in a file.
        *files: Paths that end in .yaml, .yml, .toml or .json, or directories of runs.
        **given: Fields that count over all files.

    Raises:
        ConfigError: A file is missing or cannot be read, a key is unknown (with its place and the nearest name), or a
            value cannot work.
    """
    cls = config if isinstance(config, type) else type(config)
    merged: dict[str, Any] = {} if isinstance(config, type) else to_dict(config)
    merged.pop("callbacks", None)
    for file in map(Path, files):
        changes = _read(file)
        refuse_unknown_keys(changes, cls, file)
        _merge(merged, changes, cls)
    merged |= given
    missing = [f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in missing if name not in merged]
    if missing:
        raise ConfigError(f"no file sets {', '.join(missing)}, which {cls.__name__} has no default for.")
    built = from_dict(cls, merged)
    if not isinstance(config, type):
        built.callbacks = config.callbacks
    return built


def _read(file: Path) -> dict[str, Any]:
    file = file / SAVED_NAME if file.is_dir() else file
    try:
        text = file.read_text()
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror}.") from None
    try:
        found = _parse(file, text)
    except ValueError as error:  # what all three parsers raise
        raise ConfigError(f"{file} is not valid: {' '.join(str(error).split())}.") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}. Write fields and their values.")
    return _without_that_run(found) if file.name == SAVED_NAME else found


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


def _without_that_run(saved: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in saved.items() if name not in _OF_THAT_RUN}
    if isinstance(kept.get("checkpoint_parameters"), dict):
        kept["checkpoint_parameters"] = {
            name: value for name, value in kept["checkpoint_parameters"].items() if name not in ("resume", "branch")
        }
    return kept


def refuse_unknown_keys(changes: Mapping[str, Any], cls: Any, file: Path, place: str = "") -> None:
    """Raises ConfigError for a key that is no field, with its dotted place, the file and the nearest name."""
    known = {f.name: f for f in fields(cls) if f.init}
    for key, value in changes.items():
        dotted = f"{place}{key}"
        if key == "callbacks" and not place:
            raise ConfigError(f"{file} sets callbacks, which are code. Set them in the script.")
        if key not in known:
            near = get_close_matches(str(key), known, n=1, cutoff=0.5)
            advice = f"Did you mean {place}{near[0]}?" if near else f"There is {', '.join(known)}."
            raise ConfigError(f"{file} sets {dotted}, and {cls.__name__} has no field {key}. {advice}")
        nested = _nested_class(known[key])
        if isinstance(value, Mapping) and nested is not None:
            refuse_unknown_keys(value, nested, file, f"{dotted}.")


def _merge(into: dict[str, Any], changes: Mapping[str, Any], cls: Any) -> None:
    """Fields of fields are changed one by one; a dict that is a field's value is replaced whole."""
    nested = {f.name: _nested_class(f) for f in fields(cls)}
    for key, value in changes.items():
        inner = nested[key]
        if isinstance(value, Mapping) and inner is not None:
            _merge(into.setdefault(key, {}), value, inner)
        else:
            into[key] = value


def _nested_class(field: Field[Any]) -> Any:
    """The dataclass that a field's default is of; None if it is none."""
    made_by = field.default_factory
    cls = made_by if isinstance(made_by, type) else type(field.default)
    return cls if is_dataclass(cls) else None
