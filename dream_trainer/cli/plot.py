"""`dream-trainer plot`: its arguments. What it does is in curves.py and figure.py, which `run` imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw the curves of one or several runs: losses, validation, learning rate, gradient norm and throughput."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="")]
    """Directories of runs, or their metrics.jsonl files; at least one."""
    output: Annotated[Path, arg(metavar="FILE")] = Path("plot.png")
    """Where to; its suffix says what: .png, .svg or .pdf."""
    metrics: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]", help_behavior_hint="")] = ()
    """Draw these and no others. Names as they were logged; * stands for anything, as in 'val/*'."""
    x: Literal["steps", "samples", "time"] = "steps"
    """Optimizer steps, samples, or the time since a run's first line."""
    smooth: Annotated[float, arg(metavar="SHARE")] = 0.0
    """Share of the past in a running mean of what training logged, such as 0.9; 0 draws it as it is. Validation is
    never smoothed."""
    log_y: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Logarithmic values, where all are above zero."""

    def run(self) -> int:
        """Draws, and prints where to."""
        from dream_trainer.cli.figure import plot

        plot(self.runs, self.output, metrics=self.metrics, x=self.x, smooth=self.smooth, log_y=self.log_y)
        return 0
