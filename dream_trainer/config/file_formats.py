"""The text of a config file as plain values: YAML, TOML and JSON, in which no key stands twice."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from dream_trainer.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".toml", ".json")


def read_plain(file: Path) -> Any:
    """What a file holds.

    Raises:
        ConfigError: It cannot be read, is not of its format, or sets a key twice.
    """
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file} ends in {file.suffix!r}. Use .yaml, .yml, .toml or .json.")
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".toml":
            return tomllib.loads(text)
        return _json(text) if file.suffix == ".json" else _yaml(text)
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8.") from None
    except _SetTwice as twice:
        raise ConfigError(
            f"{file} sets {twice.key} on line {twice.first} and again on line {twice.second}. Leave one out."
        ) from None
    except ValueError as error:  # what all three parsers raise
        raise ConfigError(f"{file} is not valid: {' '.join(str(error).split())}.") from None


class _SetTwice(Exception):
    """A key stands twice in one mapping, of which a parser would take the last."""

    def __init__(self, key: str, first: int, second: int) -> None:
        self.key, self.first, self.second = key, first, second


def _yaml(text: str) -> Any:
    """Safe YAML, in which `1e-3` is a number, as everywhere else; YAML 1.1 wants `1.0e-3`."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                if key.value in lines:
                    raise _SetTwice(key.value, lines[key.value], key.start_mark.line + 1)
                lines[key.value] = key.start_mark.line + 1
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _json(text: str) -> Any:
    found = json.loads(text)
    _refuse_twice(text)
    return found


def _refuse_twice(text: str) -> None:
    """Raises for a key that one object of valid JSON has twice; json's own hook does not know lines."""
    objects: list[dict[str, int]] = []  # keys with their lines, of the objects that are open
    for token in re.finditer(r'"(?:\\.|[^"\\])*"(\s*:)?|[{}]', text):
        if token[0] == "{":
            objects.append({})
        elif token[0] == "}":
            objects.pop()
        elif token[1]:
            key, line = json.loads(token[0].removesuffix(token[1])), text.count("\n", 0, token.start()) + 1
            if key in objects[-1]:
                raise _SetTwice(key, objects[-1][key], line)
            objects[-1][key] = line
