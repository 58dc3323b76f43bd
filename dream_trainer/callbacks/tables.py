"""Tables on standard output: drawn in a terminal, plain aligned text into pipes and files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from dream_trainer.screen import draw, show


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO | None = None) -> None:
    from rich.console import Console

    file = file or sys.stdout
    console = Console(file=file)
    if not console.is_interactive:
        show(plain_table(title, header, rows), file)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=bool(header))
    for index in range(max(map(len, [header, *rows]))):
        table.add_column(header[index] if header else "", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    if not draw(lambda: console.print(table), file):
        show(plain_table(title, header, rows), file)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [row for row in [header, *rows] if row]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *(f"  {line}" for line in text)])
