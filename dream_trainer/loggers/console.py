"""ConsoleLogger: metrics as plain lines on standard output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dream_trainer.loggers.formatting import format_metrics
from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.screen import show


class ConsoleLogger(Logger):
    """One line for each set of metrics, without control codes, on whatever `sys.stdout` is at that moment.

    A live progress bar takes standard output over and shows the lines above itself.
    """

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        """Says where the run keeps its files, and from which step it goes on."""
        show(f"run directory: {run_dir}" + ("" if resumed_step is None else f", resumed at step {resumed_step}"))

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Prints one line."""
        # Flushed, so that a piped log is whole when the process is killed.
        show(f"epoch {stamp.epoch} | step {stamp.step} | {format_metrics(metrics)}")
