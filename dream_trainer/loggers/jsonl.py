"""JSONLLogger: metrics as one JSON object per line, a curve that survives kills and resumes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.line_files import LineFile, read_lines
from dream_trainer.loggers.media import Histogram, Media, Table, Text

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JSONLLogger(Logger):
    """Appends to `metrics.jsonl` in the run directory.

    Each line is one object: `step`, `epoch`, `samples`, `time` (seconds since 1970), then the metrics by name. JSON has
    no NaN: what is not finite is one of the strings `"NaN"`, `"Infinity"`, `"-Infinity"`; `read_jsonl` gives floats
    back. Texts, tables and histograms go to `media.jsonl`: the stamp, `name`, `kind` and the fields of that kind.

    When a run resumes at a step, the lines of later steps are dropped in one atomic replacement, since they will come
    again. A run that starts from nothing where there is a file keeps that as `metrics.1.jsonl` (2, 3, ...).

    Args:
        filename: Name of the file in the run directory.
    """

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self._filename = filename
        self._lines: LineFile | None = None
        self._media: LineFile | None = None

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        """Prepares the files to append to."""
        self.close()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = LineFile(run_dir / self._filename, resumed_step)
        self._media = LineFile(run_dir / "media.jsonl", resumed_step)

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Appends one line, which is in the operating system's hands when this returns."""
        if self._lines is None:
            raise RuntimeError("log() was called before open(). Open the logger on a run directory first.")
        self._lines.write(stamp._asdict() | metrics)

    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        """Appends a text, table or histogram as one line."""
        if self._media is None or not isinstance(media, Text | Table | Histogram):
            return False
        self._media.write(stamp._asdict() | {"name": name, "kind": type(media).__name__.lower(), **vars(media)})
        return True

    def close(self) -> None:
        """Closes the files."""
        for file in (self._lines, self._media):
            if file is not None:
                file.close()
        self._lines = self._media = None


def read_jsonl(path: Path | str, last_step: int | None = None) -> list[dict[str, float]]:
    """The lines of a file that JSONLLogger wrote, non-finite numbers as floats.

    A last line that a kill cut short is left out.

    Args:
        path: The file.
        last_step: Lines of later steps are left out, too; None takes all.
    """
    return [
        {name: _NONFINITE[value] if isinstance(value, str) else value for name, value in record.items()}
        for _, record in read_lines(Path(path))
        if last_step is None or record["step"] <= last_step
    ]
