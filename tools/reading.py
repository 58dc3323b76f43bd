"""What one has to read to follow the code: files and lines of each row of "What to read" in docs/architecture.md.

python tools/reading.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/architecture.md"
_ROW = re.compile(r"^\| (?P<way>[^|]+) \| (?P<files>(?:`[a-z_/]+\.py`(?:, )?)+) \| (?P<lines>[\d,]+) \|$", re.M)


class Way(NamedTuple):
    """One row of the table.

    Attributes:
        name: What is followed, in words.
        files: The files, relative to `dream_trainer/`, in the order in which to read them.
        said: Lines as the page says.
    """

    name: str
    files: list[str]
    said: int

    def lines(self) -> int:
        """Lines of all its files, rounded to the next ten."""
        count = sum(len((ROOT / "dream_trainer" / file).read_text().splitlines()) for file in self.files)
        return -(-count // 10) * 10


def ways() -> list[Way]:
    """The rows of the table."""
    return [
        Way(row["way"].strip(), re.findall(r"`([a-z_/]+\.py)`", row["files"]), int(row["lines"].replace(",", "")))
        for row in _ROW.finditer(PAGE.read_text())
    ]


def main() -> None:
    """Prints the counts."""
    for way in ways():
        print(f"{way.name}: {len(way.files)} files, {way.lines():,} lines (the page says {way.said:,})")
        for file in way.files:
            print(f"    {len((ROOT / 'dream_trainer' / file).read_text().splitlines()):5,}  {file}")


if __name__ == "__main__":
    main()
