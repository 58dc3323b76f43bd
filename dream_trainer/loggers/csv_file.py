"""CSVLogger: metrics as a table that spreadsheets and pandas read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.line_files import replace_file, set_aside


class CSVLogger(Logger):
    """Appends to `metrics.csv` in the run directory: `step`, `epoch`, `samples`, `time`, then a column for each metric.

    A cell is empty where a line has no such metric; NaN and infinities are `nan`, `inf`, `-inf`. A metric that comes
    later adds a column: the file is replaced whole, once, so it is valid at any moment.

    Resumes as JSONLLogger does: rows of later steps are dropped; a run from nothing keeps an earlier file.

    Args:
        filename: Name of the file in the run directory.
    """

    def __init__(self, filename: str = "metrics.csv") -> None:
        self._filename = filename
        self._path: Path | None = None
        self._columns = list(Stamp._fields)
        self._file: TextIO | None = None

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        """Prepares the file to append to."""
        self.close()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / self._filename
        self._columns = list(Stamp._fields)
        rows: list[dict[str, Any]] = []
        if resumed_step is None:
            set_aside(self._path)
        elif self._path.exists():
            self._columns, rows = _read(self._path)
        self._rewrite(self._path, [row for row in rows if int(row["step"]) <= (resumed_step or 0)])

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Appends one row, which is in the operating system's hands when this returns."""
        if self._path is None or self._file is None:
            raise RuntimeError("log() was called before open(). Open the logger on a run directory first.")
        new = [name for name in metrics if name not in self._columns]
        if new:
            _, rows = _read(self._path)
            self._columns += new
            self._rewrite(self._path, rows)
        self._file.write(_text(self._columns, [stamp._asdict() | metrics]))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, path: Path, rows: Iterable[dict[str, Any]]) -> None:
        self.close()
        header = dict(zip(self._columns, self._columns, strict=True))
        replace_file(path, _text(self._columns, [header, *rows]))
        self._file = path.open("a", encoding="utf-8", newline="")


def _text(columns: list[str], rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _read(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows; a last row that a kill cut short is left out."""
    text = path.read_text(encoding="utf-8")
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    rows = list(reader)
    return list(reader.fieldnames or Stamp._fields), rows
