"""The text of a config file as plain values: YAML, TOML and JSON, in which no key stands twice."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from dream_trainer.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".toml", ".json")

_TAG = "tag:yaml.org,2002:"
_DOUBTFUL = "doubtful"
_BOTH_WAYS = {"yes": "true", "on": "true", "no": "false", "off": "false", "none": "null"}
# What text without quotes is: the first that fits, looked for by its first letter.
_YAML_KINDS = (
    (_DOUBTFUL, "[-+]?0[0-9_]+|None|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", list("-+0NyYnoO")),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?(?:0|[1-9][0-9_]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", "<<", ["<"]),
)


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
    except _Doubtful as doubt:
        raise ConfigError(
            f"{file} sets {doubt.key} to {doubt.text} on line {doubt.line}, which is read in two ways. Write "
            f"{doubt.meant}, or {doubt.text!r} in quotes for text."
        ) from None
    except ValueError as error:  # what all three parsers raise
        raise ConfigError(f"{file} is not valid: {' '.join(str(error).split())}.") from None


class _SetTwice(Exception):
    """A key stands twice in one mapping, of which a parser would take the last."""

    def __init__(self, key: str, first: int, second: int) -> None:
        self.key, self.first, self.second = key, first, second


class _Doubtful(Exception):
    """Text without quotes that YAML 1.1 and 1.2, or YAML and Python, take for different things."""

    def __init__(self, key: str, text: str, line: int, meant: str) -> None:
        self.key, self.text, self.line, self.meant = key, text, line, meant


def _yaml(text: str) -> Any:
    """YAML by the core rules of 1.2, where PyYAML follows 1.1.

    In 1.1 `0123` is 83, `1:30` is 90, `yes` is true, `2024-01-02` a date and `1e-3` text. Here numbers are Python's,
    and what one would read in two ways is refused. No tag runs code.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012  # those of 1.1

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
                if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
                    continue
                if key.value in lines:
                    raise _SetTwice(key.value, lines[key.value], key.start_mark.line + 1)
                lines[key.value] = key.start_mark.line + 1
                _refuse_doubtful(value, key.value)
            return super().construct_mapping(node, deep)

    for kind, pattern, first in _YAML_KINDS:
        Loader.add_implicit_resolver(f"{_TAG}{kind}", re.compile(rf"(?:{pattern})$"), first)
    Loader.add_constructor(f"{_TAG}int", lambda _, node: int(node.value, 0))
    Loader.add_constructor(f"{_TAG}{_DOUBTFUL}", lambda _, node: node.value)  # as a key
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _refuse_doubtful(node: Any, key: str) -> None:
    """Raises for text that is one thing to YAML 1.1, and another to 1.2, as a value or in a list of values."""
    if node.id == "sequence":
        for one in node.value:
            _refuse_doubtful(one, key)
    elif node.tag == f"{_TAG}{_DOUBTFUL}":
        digits = node.value.replace("_", "").lstrip("+-").lstrip("0") or "0"
        sign = "-" if node.value.startswith("-") else ""
        number = f"{sign}{digits}" if set("89") & set(digits) else f"{sign}{digits}, {sign}0o{digits} (to the base 8)"
        meant = _BOTH_WAYS.get(node.value.lower(), number)
        raise _Doubtful(key, node.value, node.start_mark.line + 1, meant)


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
