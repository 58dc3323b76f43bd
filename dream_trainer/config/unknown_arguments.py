"""What to say of words on a command line that are no argument of the config: one line, with what was meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from dream_trainer.config.config_files import section_of
from dream_trainer.errors import ConfigError

# What spelling alone would not find, or not first.
_OTHER_WORDS = {"learning-rate": "lr", "lr": "learning-rate", "batch-size": "train-batch-size"}
_OTHER_WORDS |= {"tp": "tensor-parallel", "cp": "context-parallel", "pp": "pipeline-parallel", "ep": "expert-parallel"}
_BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")


def refuse_values_of_booleans(config: Any, args: Sequence[str]) -> None:
    """Raises ConfigError for a boolean that is given a value: `--flag true`, `--flag=true`.

    Args:
        config: The config, or its class.
        args: All words.
    """
    flags = dict(_flags(config))
    for word, after in pairwise([*args, ""]):
        flag, name = _spelled(word), _without_no(_spelled(word))
        value = word.partition("=")[2] or (after if after.lower() in _BOOLEANS else "")
        if value and flags.get(name):
            raise ConfigError(
                f"{flag} takes no value, and {value!r} is given. Write {name} to set it, or {_unset(name)} to unset it."
            )


def refuse_unknown(config: Any, unknown: Sequence[str]) -> None:
    """Raises ConfigError for the first word that the parser had no use for.

    Args:
        config: The config, or its class.
        unknown: The words that the parser had no use for, in their order.
    """
    if not unknown:
        return
    if not unknown[0].startswith("--"):
        raise ConfigError(f"{unknown[0]!r} belongs to no flag. Write --FIELD VALUE; --help shows the fields.")
    flag = _spelled(unknown[0])
    near = _nearest(flag, dict(_flags(config)))
    if near == flag:  # tyro makes a flag of each key that a dict has
        raise ConfigError(f"{flag} is a dict, and each of its keys has a flag. Write {flag}.KEY VALUE.")
    advice = f"Did you mean {near}?" if near else "--help-all shows every one."
    raise ConfigError(f"there is no flag {flag}. {advice}")


def _flags(start: Any, prefix: str = "--") -> Iterator[tuple[str, bool]]:
    """Each flag, and whether it is a boolean's; one with tyro's own annotation may take a value, and is none."""
    for field in fields(start):
        if not field.init or field.name == "callbacks":
            continue
        flag = f"{prefix}{field.name.replace('_', '-')}"
        section = section_of(start, field)
        if section is None:
            yield flag, field.type in (bool, "bool")
        else:
            yield from _flags(section, f"{flag}.")


def _nearest(flag: str, flags: dict[str, bool]) -> str | None:
    """The flag whose whole name is near; else one of any section whose last part is the same, or near."""
    if flag.startswith("--no-") and flags.get(f"--{flag.removeprefix('--no-')}"):
        return _unset(f"--{flag.removeprefix('--no-')}")
    section = flag.rpartition(".")[0]
    of_section = {_last(known): known for known in flags if section and known.startswith(f"{section}.")}
    for among in (of_section, {_last(known): known for known in reversed(flags)}):
        same = next((word for word in (_last(flag), _OTHER_WORDS.get(_last(flag))) if word in among), None)
        close = [same] if same is not None else get_close_matches(_last(flag), among, n=1, cutoff=0.7)
        if close:
            return among[close[0]]
    if section and of_section:  # of a section that is there, whose name would be most of what is alike
        return None
    return next(iter(get_close_matches(flag, flags, n=1, cutoff=0.8)), None)


def _last(flag: str) -> str:
    return flag.removeprefix("--").rpartition(".")[2]


def _unset(flag: str) -> str:
    section, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{section}{dot}no-{name}"


def _without_no(flag: str) -> str:
    section, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{section}{dot}{name.removeprefix('no-')}"


def _spelled(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
