"""Numbers, durations and sizes as people read them."""

from __future__ import annotations

import math


def format_number(value: float) -> str:
    """Four significant digits: `0.1235`, `12.3`, `48,000`, `3.1e-07`, `nan`."""
    if not math.isfinite(value):
        return str(float(value))
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def format_metrics(metrics: dict[str, float]) -> str:
    """`train/loss 1.234 | train/lr 3e-04`."""
    return " | ".join(f"{name} {format_number(value)}" for name, value in metrics.items())


def format_duration(seconds: float) -> str:
    """`0:42`, `12:05`, `3:00:00`, `2d 4:00:00`."""
    total = round(seconds)
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days}d {hours}:{minutes:02}:{left:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def format_count(count: float) -> str:
    """`950`, `12.3 K`, `124 M`, `7.24 B`: how many of something, to three digits."""
    for unit in ("", " K", " M", " B"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:,.3g} T"


def format_bytes(count: float) -> str:
    """`512 B`, `1.50 KiB`, `2.34 GiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.2f} {unit}"
    return f"{count / 1024:.2f} TiB"
