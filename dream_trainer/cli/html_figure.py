"""Curves as one HTML file that needs nothing else: what is under the mouse is read off, smoothing can be changed."""

from __future__ import annotations

import json
from pathlib import Path

from dream_trainer.cli.curves import Curve, label, time_scale
from dream_trainer.cli.figure_style import COLOURS, DASHES

_TEMPLATE = Path(__file__).with_name("curves.html")


def html_figure(found: dict[str, list[Curve]], *, x: str, smooth: float, log_y: bool) -> str:
    """The page.

    Args:
        found: Curves by the title of their panel.
        x: "steps", "samples" or "time".
        smooth: Share of the past in a running mean of what training logged, to begin with.
        log_y: Whether values are logarithmic to begin with, where all are above zero.
    """
    runs = list(dict.fromkeys(curve.run for curves in found.values() for curve in curves))
    scale, unit = time_scale(found) if x == "time" else (1.0, {"steps": "optimizer steps", "samples": "samples"}[x])
    data = {
        "title": " and ".join(runs) if len(runs) < 3 else f"{len(runs)} runs",
        "unit": unit,
        "smooth": smooth,
        "logY": log_y,
        "panels": [
            {"title": title, "curves": [_curve(curve, curves, runs, scale) for curve in curves]}
            for title, curves in found.items()
        ],
    }
    # A name with </script> in it would end the script: < is written as JSON may write it.
    return _TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", json.dumps(data).replace("<", "\\u003c"))


def _curve(curve: Curve, beside: list[Curve], runs: list[str], scale: float) -> dict[str, object]:
    metrics = list(dict.fromkeys(other.metric for other in beside))
    run, metric = runs.index(curve.run), metrics.index(curve.metric)
    several = len(runs) > 1
    return {
        "name": label(curve, runs, metrics),
        "colour": COLOURS[(run if several else metric) % len(COLOURS)],
        "dashes": DASHES[metric % len(DASHES)] if several else "",
        "isValidation": curve.is_validation,
        "x": [place / scale for place in curve.x],
        "y": [value if value == value else None for value in curve.y],
    }
