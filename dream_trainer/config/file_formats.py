"""The text of a config file as plain values: YAML, TOML and JSON, in which no key stands twice."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dream_trainer.checks import refuse
from dream_trainer.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_AMBIGUOUS = "ambiguous"
_MEANINGS = {"yes": "true", "on": "true", "no": "false", "off": "false", "none": "null"}
# Text without quotes is the first kind that fits; kinds are looked up by its first letter.
_YAML_KINDS = (
    (_AMBIGUOUS, "[-+]?0[0-9_]+|None|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", list("-+0NyYnoO")),
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


class _WrongKey(Exception):
    """A key that stands twice, or whose value can be read in two ways; the message begins after the file's name."""


def read_plain(file: Path) -> Any:
    readers: dict[str, Callable[[str], Any]] = {".yaml": _yaml, ".yml": _yaml, ".toml": tomllib.loads, ".json": _json}
    refuse(file.suffix not in readers, f"{file} ends in {file.suffix!r}. Use .yaml, .yml, .toml or .json.")
    try:
        return readers[file.suffix](file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8.") from None
    except _WrongKey as wrong:
        raise ConfigError(f"{file} sets {wrong}") from None
    except ValueError as error:  # raised by all three parsers
        raise ConfigError(f"{file} is not valid: {' '.join(str(error).split())}.") from None


def _yaml(text: str) -> Any:
    """YAML by the core rules of 1.2, without tags; text that 1.1, PyYAML's version, reads otherwise raises an error."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012  # those of 1.1

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
                if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
                    continue
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise _WrongKey(f"{key.value} on line {lines[key.value]} and again on line {line}. Leave one out.")
                lines[key.value] = line
                _refuse_ambiguous(value, key.value)
            return super().construct_mapping(node, deep)

    for kind, pattern, first in _YAML_KINDS:
        Loader.add_implicit_resolver(f"{_TAG}{kind}", re.compile(rf"(?:{pattern})$"), first)
    Loader.add_constructor(f"{_TAG}int", lambda _, node: int(node.value, 0))
    Loader.add_constructor(f"{_TAG}{_AMBIGUOUS}", lambda _, node: node.value)  # as a key
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _refuse_ambiguous(node: Any, key: str) -> None:
    """Raises for text that YAML 1.1 and 1.2, or YAML and Python, read differently, as a value or in a list."""
    if node.id == "sequence":
        for item in node.value:
            _refuse_ambiguous(item, key)
    elif node.tag == f"{_TAG}{_AMBIGUOUS}":
        digits = node.value.replace("_", "").lstrip("+-").lstrip("0") or "0"
        sign = "-" if node.value.startswith("-") else ""
        number = f"{sign}{digits}" if set("89") & set(digits) else f"{sign}{digits}, {sign}0o{digits} (to the base 8)"
        raise _WrongKey(
            f"{key} to {node.value} on line {node.start_mark.line + 1}, which is read in two ways. Write "
            f"{_MEANINGS.get(node.value.lower(), number)}, or {node.value!r} in quotes for text."
        )


def _json(text: str) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(found)) < len(found):
            _yaml(text.replace("\t", " "))  # raises, with the lines
        return dict(found)

    return json.loads(text, object_pairs_hook=pairs)
