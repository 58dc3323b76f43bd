"""What commands print: JSON that every reader takes, and cells of tables."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from dream_trainer.loggers.formatting import format_number

if TYPE_CHECKING:
    from dream_trainer.checkpoint.manifest import Manifest


def print_json(value: Any) -> None:
    """Prints strict JSON on stdout. Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity"."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    return str(value)


def described(manifest: Manifest) -> dict[str, Any]:
    """A manifest's short facts, for JSON."""
    names = ("epoch", "samples_seen", "world_size", "mesh_shape", "metrics", "versions", "wall_time")
    return {name: vars(manifest)[name] for name in names}


def number_cell(value: Any) -> str:
    """A metric's value as people read it; "-" if there is none."""
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
    """How long ago that was: `42 s`, `12 min`, `3.5 h`, `8.1 d`."""
    return seconds_cell(max(0.0, time.time() - wall_time))


def seconds_cell(seconds: float) -> str:
    """A span of time in the unit that fits: `42 s`, `12 min`, `3.5 h`, `8.1 d`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86400 else f"{seconds / 86400:.1f} d"
