"""JSONLLogger: metrics as one JSON object per line, a curve that survives kills and resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from dream_trainer.loggers.base import Logger, Stamp

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JSONLLogger(Logger):
    """Appends to `metrics.jsonl` in the run directory, and writes the configuration to `config.json` beside it.

    Each line is one object: `step`, `epoch`, `samples`, `time` (seconds since 1970), then the metrics by name. JSON has
    no NaN: what is not finite is one of the strings `"NaN"`, `"Infinity"`, `"-Infinity"`; `read_jsonl` gives floats
    back.

    When a run resumes at a step, the lines of later steps are dropped in one atomic replacement, since they will come
    again. A run that starts from nothing where there is a file keeps that as `metrics.1.jsonl` (2, 3, ...).

    Args:
        filename: Name of the file in the run directory.
    """

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self._filename = filename
        self._file: TextIO | None = None

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        """Prepares the file to append to."""
        self.close()
        run_dir.mkdir(parents=True, exist_ok=True)
        _replace(run_dir / "config.json", json.dumps(config, indent=2, default=str) + "\n")
        path = run_dir / self._filename
        if path.exists():
            if resumed_step is None:
                _set_aside(path)
            else:
                _drop_after(path, resumed_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Appends one line, which is in the operating system's hands when this returns."""
        if self._file is None:
            raise RuntimeError("log() was called before open(). Open the logger on a run directory first.")
        values = {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(stamp._asdict() | values, allow_nan=False) + "\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_jsonl(path: Path | str) -> list[dict[str, float]]:
    """The lines of a file that JSONLLogger wrote, non-finite numbers as floats.

    A last line that a kill cut short is left out.
    """
    return [
        {name: _NONFINITE[value] if isinstance(value, str) else value for name, value in record.items()}
        for _, record in _lines(Path(path))
    ]


def _plain(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each whole line of the file with the object in it."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and line.endswith("\n"):
                yield line, record


def _drop_after(path: Path, step: int) -> None:
    _replace(path, "".join(line for line, record in _lines(path) if record["step"] <= step))


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all, whenever the process is killed."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
