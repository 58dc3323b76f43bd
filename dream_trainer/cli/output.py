"""Shared parts of commands: types of arguments, JSON for other programs, and cells of tables."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, arg

from dream_trainer.screen import format_duration, format_number

# Help texts leave out the defaults None and False.
Flag = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]
Count = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
Name = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Shows:
    """A command that shows something."""

    as_json: Annotated[FlagCreatePairsOff[bool], arg(name="json", help_behavior_hint="")] = False
    """Print JSON, with everything."""


def print_json(value: Any) -> None:
    """Prints strict JSON on stdout. Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity"."""
    from dream_trainer.loggers.line_files import json_ready

    print(json.dumps(json_ready(value), indent=2, allow_nan=False, default=str))


def number_cell(value: Any) -> str:
    """A metric's value for people; "-" if there is none."""
    if value is None:
        return "-"
    return format_number(float(value)) if isinstance(value, Real) else str(value)


def metrics_cell(metrics: Mapping[str, Any]) -> str:
    """`val/loss 1.234, val/accuracy 0.56`."""
    return ", ".join(f"{name} {number_cell(value)}" for name, value in metrics.items()) or "-"


def mesh_cell(mesh_shape: Mapping[str, int]) -> str:
    """The dimensions with more than one rank, `dp_shard 2, tp 4`."""
    return ", ".join(f"{name} {size}" for name, size in mesh_shape.items() if size > 1) or "-"


def age_cell(wall_time: float) -> str:
    """The time since then, `12:05`."""
    return format_duration(max(0.0, time.time() - wall_time))


def value_cell(value: Any) -> str:
    """A value for people: text without quotes, containers as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str) if value is not None else "None"
