"""Files that outlive kills: appended to line by line, cut back on a resume, replaced whole or not at all."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_in_json = json.JSONEncoder(allow_nan=False, check_circular=False).encode  # `json.dumps` makes one for each call


class LineFile:
    """JSON objects that have a `step`, one a line.

    JSON has no NaN: what is not finite is one of the strings `"NaN"`, `"Infinity"`, `"-Infinity"`.

    Args:
        resumed_step: Lines of later steps are dropped in one atomic replacement, since they will come again. None for a
            run that starts from nothing: a file that is there is kept under another name.
    """

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        self._path = path
        self._file: TextIO | None = None
        if resumed_step is None:
            set_aside(path)
        elif path.exists():
            replace_file(path, "".join(line for line, record in read_lines(path) if record["step"] <= resumed_step))

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, which is in the operating system's hands when this returns."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        try:
            line = _in_json(record)
        except ValueError:  # rare, and looking for it in each line costs as much as the line
            line = _in_json(json_ready(record))
        self._file.write(line + "\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each whole line of the file with the object in it; a last line that a kill cut short is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and line.endswith("\n"):
                yield line, record


def set_aside(path: Path) -> None:
    """Renames a file or directory, if it is there, to `name.1.suffix` (2, 3, ...)."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


def replace_file(path: Path, text: str) -> None:
    """Writes a file whole or not at all, whenever the process is killed. Line ends are written as they are.

    Several processes may replace one file at once, as ranks that fail together do: the last one counts.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def json_ready(value: Any) -> Any:
    """`value` with strings for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
