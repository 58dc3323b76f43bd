"""Drawing curves: one panel for each kind of metric, runs told apart by colour and metrics by line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dream_trainer.cli.curves import Curve, label, smoothed, time_scale
from dream_trainer.cli.figure_style import COLOURS, LINES
from dream_trainer.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and read by a screen reader
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
}


def save_figure(found: dict[str, list[Curve]], output: Path, *, x: str, smooth: float, log_y: bool) -> None:
    """Draws panels of curves into a file.

    Raises:
        ConfigError: The suffix says no format, or matplotlib is not installed.
    """
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--output {output} does not say what to draw. End it in {', '.join(SUFFIXES)}.")
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError(
            "plot draws pictures with matplotlib, which is not installed. pip install 'dream-trainer[plot]', or draw "
            "with --terminal or --html FILE."
        ) from error
    with rc_context(_SETTINGS):
        figure = draw(found, x=x, smooth=smooth, log_y=log_y)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=150)


def draw(found: dict[str, list[Curve]], *, x: str, smooth: float = 0.0, log_y: bool = False) -> Figure:
    """The figure of some panels of curves."""
    from matplotlib.figure import Figure

    n_columns = 1 if len(found) == 1 else 2
    n_rows = -(-len(found) // n_columns)
    figure = Figure(figsize=(5.2 * n_columns + 0.4, 2.9 * n_rows + 0.5), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True).ravel()
    runs = list(dict.fromkeys(curve.run for curves in found.values() for curve in curves))
    figure.suptitle(" and ".join(runs) if len(runs) < 3 else f"{len(runs)} runs", fontsize=11)
    scale, unit = time_scale(found) if x == "time" else (1.0, {"steps": "optimizer steps", "samples": "samples"}[x])
    for axes, (title, curves) in zip(grid, found.items(), strict=False):
        _draw_panel(axes, curves, runs, scale=scale, smooth=smooth)
        axes.set_title(title)
        axes.set_xlabel(unit)
        axes.tick_params(labelbottom=True)
        _set_scales(axes, curves, log_y=log_y)
        if title.endswith("per second") and not log_y:
            axes.set_ylim(bottom=0)
    for axes in grid[len(found) :]:
        axes.set_axis_off()
    return figure


def _draw_panel(axes: Axes, curves: Sequence[Curve], runs: Sequence[str], *, scale: float, smooth: float) -> None:
    metrics = list(dict.fromkeys(curve.metric for curve in curves))
    for curve in curves:
        run, metric = runs.index(curve.run), metrics.index(curve.metric)
        colour = COLOURS[(run if len(runs) > 1 else metric) % len(COLOURS)]
        style: dict[str, Any] = {"color": colour, "linewidth": 1.5, "label": label(curve, runs, metrics)}
        if len(runs) > 1:
            style["linestyle"] = LINES[metric % len(LINES)]
        if curve.is_validation or len(curve.x) == 1:
            style |= {"marker": "o", "markersize": 3.5 if len(curve.x) < 50 else 2}
        places, values = [place / scale for place in curve.x], list(curve.y)
        if smooth and not curve.is_validation:
            axes.plot(places, values, color=colour, linewidth=0.8, alpha=0.25, label="_as logged")
            values = smoothed(values, smooth)
        axes.plot(places, values, **style)
    if len(curves) > 1:
        axes.legend()


def _set_scales(axes: Axes, curves: Sequence[Curve], *, log_y: bool) -> None:
    from matplotlib.ticker import EngFormatter, ScalarFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if log_y and all(value > 0 or value != value for curve in curves for value in curve.y):
        axes.set_yscale("log")
        _label_logarithmic(axes)
        return
    plain = ScalarFormatter(useOffset=False)  # an offset in the corner is easily overlooked
    plain.set_powerlimits((-3, 5))
    axes.yaxis.set_major_formatter(plain)


def _label_logarithmic(axes: Axes) -> None:
    """Ticks with plain numbers where powers of ten are too few to read values from; beyond, they stay."""
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    if decades >= 3:
        return
    axes.yaxis.set_major_locator(AutoLocator() if decades < 1 else LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
