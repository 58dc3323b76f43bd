"""Sections that may be None, on a command line: a flag into one builds it, and `--section None` drops it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from types import NoneType
from typing import Any, TypeVar

from dream_trainer.config.config_files import field_types, required_fields, section_of
from dream_trainer.config.wanted_values import members

T = TypeVar("T")


def sections_opened(cls: type, args: Sequence[str]) -> bool:
    """Whether a word of `args` is a flag into, or the name of, a section of `cls` that may be None.

    Where one is chosen in tyro's own way, `section:type`, flags belong behind that, and nothing is opened here.
    """
    optional = list(_optional(cls))
    if any(word.startswith(f"{flag.removeprefix('--')}:") for word in args for flag, _ in optional):
        return False
    return any(word == flag or word.startswith(f"{flag}.") for flag, _ in optional for word in _flags(args))


def with_sections(config: T, args: Sequence[str]) -> tuple[T, list[str]]:
    """`config` with the sections that flags lead into, each with its defaults where it was None, and without those that
    are set to None; and the words that are left.
    """
    rest = list(args)
    changes: dict[str, Any] = {}
    for flag, name in _optional(type(config)):
        if flag in _flags(rest) and (at := _flags(rest).index(flag)) + 1 < len(rest) and rest[at + 1] == "None":
            del rest[at : at + 2]
            changes[name] = None
        elif any(word.startswith(f"{flag}.") for word in _flags(rest)):
            section = section_of(config, next(f for f in fields(config) if f.name == name))  # type: ignore[arg-type]
            if isinstance(section, type) and not required_fields(section):
                changes[name] = section()
    return (replace(config, **changes) if changes else config), rest  # type: ignore[type-var]


def _optional(cls: type) -> Iterator[tuple[str, str]]:
    """Flag and name of the fields that hold one kind of dataclass, or None."""
    for name, annotation in field_types(cls).items():
        parts = members(annotation)
        if NoneType in parts and sum(is_dataclass(part) for part in parts) == 1 and len(parts) == 2:
            yield f"--{name.replace('_', '-')}", name


def _flags(args: Sequence[str]) -> list[str]:
    return [word.partition("=")[0].replace("_", "-") for word in args]
