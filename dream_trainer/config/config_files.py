"""Configs from files: YAML, TOML and JSON, merged in order over a config, and configs that other runs have saved."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from dream_trainer.checks import all_of, did_you_mean, refuse
from dream_trainer.config.parameter_class import members, with_new_names
from dream_trainer.config.serialize import structure
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError
from dream_trainer.screen import logger

T = TypeVar("T", bound=BaseTrainerConfig)
SAVED_NAME = "config.json"
RECORD_NAME = "run.json"  # in the same run directory
_NAMES = ("project", "group", "experiment")
# Fields of a saved config that only concern its own run: its place and start, and the record of what is code.
_OF_THAT_RUN = (*_NAMES, "runs_dir", "callbacks", "given_objects")
_OF_ITS_START = ("resume", "branch")


def load_config(config: T | type[T], *files: str | Path, **given: Any) -> T:
    """Builds a config from files, merged in order: each lists changes, and later files win.

    Fields that are in no file keep the value of `config`. A run's directory, or a copy of its `config.json`, is read
    without its run-specific fields: its three names, `runs_dir`, its resume settings, and its callbacks.

    Args:
        config: Instance that the files change, or a class, whose fields without default must be in a file.
        *files: Paths that end in .yaml, .yml, .toml or .json, or directories of runs.
        **given: Fields that override all files, as the config's constructor takes them.

    Raises:
        ConfigError: A file is missing or cannot be read, a key is unknown (with its place and the nearest name) or
            occurs twice, or a value is invalid; with the file.
    """
    return cast(T, changed(config, [read_changes(Path(path)) for path in files], given))


def is_saved(config: dict[str, Any]) -> bool:
    """Whether a file was saved by a run: it has the record of the run's callbacks, which only a run writes."""
    return isinstance(config.get("callbacks"), list) and all(name in config for name in _NAMES)


def field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields by name, with no annotation left as text."""
    try:
        return get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"the types of {cls.__name__}'s fields cannot be found: {error}. Define {cls.__name__} and the types it "
            "uses at the top of a module, not in a function or under TYPE_CHECKING."
        ) from None


def read_changes(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file that `path` means, and the fields that it sets; of a saved config, without those of that run."""
    file = path / SAVED_NAME if path.is_dir() else path
    found = read_plain(file)
    if found is None:
        return file, {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}. Write fields and their values.")
    if not is_saved(found):
        return file, found
    left_out = [name for name in _OF_THAT_RUN if name in found]
    kept = {name: value for name, value in found.items() if name not in _OF_THAT_RUN}
    if isinstance(checkpoints := kept.get("checkpoint_parameters"), dict):
        left_out += [f"checkpoint_parameters.{name}" for name in _OF_ITS_START if name in checkpoints]
        kept["checkpoint_parameters"] = {n: value for n, value in checkpoints.items() if n not in _OF_ITS_START}
    logger.info("%s is what a run saved; left out: %s.", file, ", ".join(left_out))
    return file, kept


def field_meant(cls: Any, word: str) -> str:
    """The field that a file or flag names: `training` is `training_parameters`, unless there is a `training` too."""
    names = {f.name for f in fields(cls)}
    return f"{word}_parameters" if word not in names and f"{word}_parameters" in names else word


def changed(
    start: Any, changes: Sequence[tuple[Path, Mapping[str, Any]]], given: Mapping[str, Any], at: str = ""
) -> Any:
    """A dataclass with what each file sets in it, and `given`, which is not plain; all else is as in `start`."""
    cls = class_of(start)
    known = {f.name: f for f in fields(cls) if f.init}
    found: dict[str, list[tuple[Path, Any]]] = {}
    for file, of_file in changes:
        for word, value in with_new_names(cls, of_file).items():
            key = field_meant(cls, word)
            refuse(key == "callbacks" and not at, f"{file} sets callbacks, which are code. Set them in the script.")
            if key not in known:
                advice = did_you_mean(str(key), known, place=at)
                raise ConfigError(f"{file} sets {at}{key}, and {cls.__name__} has no field {key}. {advice}")
            found.setdefault(key, []).append((file, value))
    asked = {
        key: partial(_value, start, known[key], values, f"{at}{key}")
        for key, values in found.items()
        if key not in given
    }
    values = {**given, **dict(zip(asked, all_of(asked.values()), strict=True))}
    try:
        return cls(**values) if start is cls else replace(start, **values)
    except Exception as error:  # ours and the user's validation
        problem = str(error) if isinstance(error, ConfigError) else f"the data does not fit {cls.__name__}: {error}"
        files = dict.fromkeys(str(file) for file, _ in changes)
        raise ConfigError(": ".join([*files, *filter(None, [at.removesuffix(".")]), problem])) from error


def _value(start: Any, field: Field[Any], found: Sequence[tuple[Path, Any]], dotted: str) -> Any:
    """A field's value after files: the last one's, or a section with what those after the last whole value change."""
    annotation = field_types(class_of(start))[field.name]
    if isinstance(start, type):
        nested: Any = field.default if field.default_factory is MISSING else field.default_factory()
    else:
        nested = getattr(start, field.name)
    if not is_dataclass(nested) or isinstance(nested, type):  # a section begins from its type
        classes = [part for part in members(annotation) if is_dataclass(part)]
        nested = classes[0] if len(classes) == 1 else None
    changes: list[tuple[Path, Mapping[str, Any]]] = []
    last: tuple[Path, Any] | None = None
    for file, value in found:
        if nested is not None and isinstance(value, Mapping):
            last = None
            changes.append((file, value))
        elif nested is None or value is not None or NoneType in members(annotation):  # else nothing stands under it
            last = (file, value)
            changes.clear()
    return changed(nested, changes, {}, f"{dotted}.") if last is None else _structured(*last, annotation, dotted)


def _structured(file: Path, value: Any, annotation: Any, dotted: str) -> Any:
    advice, parts = f"It takes {inspect.formatannotation(annotation)}.", members(annotation)
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    is_text = isinstance(value, str) and str not in (*parts, *map(type, choices))
    if is_text and any(map(_is_sequence, parts)):  # it would be taken letter by letter
        advice += f" Write [{value}]."
    else:
        try:
            return structure(value, annotation, dotted)
        except ConfigError as error:
            advice += f" {error}"
    raise ConfigError(f"{file} sets {dotted} to {value!r}. {advice}")


def class_of(start: Any) -> Any:
    return start if isinstance(start, type) else type(start)


def _is_sequence(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and (origin is Sequence or issubclass(origin, list | tuple | set | frozenset))


# -- The text of a config file as plain values: YAML, TOML and JSON without duplicate keys.


_TAG = "tag:yaml.org,2002:"
# Text without quotes is the first kind that fits.
_YAML_KINDS = {
    "null": "~|null|Null|NULL|None|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": "<<",
}


def read_plain(file: Path) -> Any:
    readers: dict[str, Callable[[str], Any]] = {".yaml": _yaml, ".yml": _yaml, ".toml": tomllib.loads, ".json": _json}
    refuse(file.suffix not in readers, f"{file} ends in {file.suffix!r}. Use .yaml, .yml, .toml or .json.")
    try:
        return readers[file.suffix](file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # raised by all three parsers, and by what is not UTF-8
        raise ConfigError(f"{file} is not valid: {' '.join(str(error).split())}.") from None


def _yaml(text: str) -> Any:
    """YAML by the core rules of 1.2, without tags, and Python's `None`. PyYAML's own are those of 1.1."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012  # those of 1.1

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
                    continue
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ValueError(f"{key.value} is on line {lines[key.value]} and again on line {line}")
                lines[key.value] = line
            return super().construct_mapping(node, deep)

    for kind, pattern in _YAML_KINDS.items():
        Loader.add_implicit_resolver(f"{_TAG}{kind}", re.compile(rf"({pattern})$"), None)
    Loader.add_constructor(f"{_TAG}int", lambda _, node: int(node.value, 0 if node.value[1:2] in "ox" else 10))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _json(text: str) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(found)) < len(found):
            _yaml(text.replace("\t", " "))  # raises, with the lines
        return dict(found)

    return json.loads(text, object_pairs_hook=pairs)
