"""`dream-trainer plot`: its arguments, and what becomes of them.

Which curves there are is in curves.py; figure.py, html_figure.py and terminal_figure.py draw them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

if TYPE_CHECKING:
    from dream_trainer.cli.curves import Curve


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw the curves of one or several runs: losses, validation, learning rate, gradient norm and throughput."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="")]
    """Directories of runs, or of groups, all of whose runs are drawn; or metrics.jsonl files; at least one."""
    output: Annotated[Path | None, arg(metavar="FILE")] = None
    """Where to; its suffix says what: .png, .svg or .pdf. plot.png, if nothing else is asked for either."""
    html: Annotated[Path | None, arg(metavar="FILE")] = None
    """One HTML file that needs nothing else, whose values can be read off with the mouse."""
    terminal: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Draw into this terminal. Neither this nor --html needs matplotlib."""
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
        from dream_trainer.cli.curves import names_of, panels, read_run, runs_of
        from dream_trainer.errors import ConfigError

        if not self.runs:
            raise ConfigError("no run is named. Give a run's directory, such as runs/project/group/experiment.")
        if not 0.0 <= self.smooth < 1.0:
            raise ConfigError(f"--smooth {self.smooth} is not in [0, 1). Use 0 for none, or such as 0.9.")
        runs = [run for path in self.runs for run in runs_of(path)]
        found = panels(dict(zip(names_of(runs), map(read_run, runs), strict=True)), self.metrics, self.x)
        if self.terminal:
            self._print(found)
        files = [file for file in (self.output, self.html) if file is not None]
        if not files and not self.terminal:
            files = [Path("plot.png")]
        for file in files:
            self._write(found, file)
            print(f"drew {', '.join(found)}: {file}")
        return 0

    def _print(self, found: dict[str, list[Curve]]) -> None:
        import os
        import shutil
        import sys

        from dream_trainer.cli.terminal_figure import terminal_figure

        width = min(shutil.get_terminal_size().columns, 120)
        in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(terminal_figure(found, x=self.x, smooth=self.smooth, log_y=self.log_y, width=width, in_colour=in_colour))

    def _write(self, found: dict[str, list[Curve]], file: Path) -> None:
        if file is not self.html:
            from dream_trainer.cli.figure import save_figure

            save_figure(found, file, x=self.x, smooth=self.smooth, log_y=self.log_y)
            return
        from dream_trainer.cli.html_figure import html_figure

        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(html_figure(found, x=self.x, smooth=self.smooth, log_y=self.log_y), encoding="utf-8")
