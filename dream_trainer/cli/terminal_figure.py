"""Curves as text: in a terminal with colours and Braille dots, elsewhere with one letter for each curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from dream_trainer.cli.curves import Curve, label, shown_values, time_scale
from dream_trainer.loggers.formatting import format_count, format_number

_HEIGHT = 12  # rows of a panel
_GUTTER = 10  # letters of the vertical axis
_LETTERS = "*+ox#@%&"
_COLOURS = (34, 33, 32, 35, 36, 31, 94, 90)
# The bits of a Braille letter's eight dots, by row and column.
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

Point = tuple[float, float]


def terminal_figure(
    found: dict[str, list[Curve]], *, x: str, smooth: float, log_y: bool, width: int, in_colour: bool
) -> str:
    """The panels below each other.

    Args:
        found: Curves by the title of their panel.
        x: "steps", "samples" or "time".
        smooth: Share of the past in a running mean of what training logged.
        log_y: Logarithmic values, where all are above zero.
        width: Letters of a line.
        in_colour: Whether curves are told apart by colour, with control codes, and drawn with Braille dots; else each
            is drawn with a letter.
    """
    runs = list(dict.fromkeys(curve.run for curves in found.values() for curve in curves))
    lines = [runs[0], ""] if len(runs) == 1 else []
    scale, unit = time_scale(found) if x == "time" else (1.0, {"steps": "optimizer steps", "samples": "samples"}[x])
    # One axis for all panels, so that one can compare.
    left, right = _span([place / scale for curves in found.values() for curve in curves for place in curve.x])
    columns = max(20, width - _GUTTER - 2)
    ends = format_count(left), f"{format_count(right)} {unit}"
    for title, curves in found.items():
        metrics = list(dict.fromkeys(curve.metric for curve in curves))
        cells, axis = _drawn(curves, (left * scale, right * scale), smooth, log_y, columns, in_colour)
        lines.append(title)
        lines += [f"{tick:>{_GUTTER}} │{text}" for tick, text in zip(axis, cells.rows(), strict=True)]
        lines.append(" " * (_GUTTER + 2) + ends[0] + ends[1].rjust(columns - len(ends[0])))
        for number, curve in enumerate(curves):
            lines.append(f"{' ' * (_GUTTER + 2)}{cells.mark(number)} {label(curve, runs, metrics)}")
        lines.append("")
    return "\n".join(lines[:-1])


def _drawn(
    curves: Sequence[Curve], span: Point, smooth: float, log_y: bool, columns: int, in_colour: bool
) -> tuple[_Cells, list[str]]:
    """The curves on a canvas, and what stands beside its rows."""
    is_log = log_y and all(value > 0 or value != value for curve in curves for value in curve.y)
    values = [[math.log10(value) if is_log else value for value in shown_values(curve, smooth)] for curve in curves]
    low, high = _span([value for some in values for value in some if not math.isnan(value)] or [0.0])
    left, right = span
    dots = (2, 4) if in_colour else (1, 1)
    cells = _Cells(columns * dots[0], _HEIGHT * dots[1], dots, in_colour)
    for number, (curve, some) in enumerate(zip(curves, values, strict=True)):
        points = zip(curve.x, some, strict=True)
        cells.draw(number, [((x - left) / (right - left), (y - low) / (high - low)) for x, y in points])
    axis = [""] * _HEIGHT
    for row in (0, _HEIGHT // 2, _HEIGHT - 1):
        value = high - (high - low) * row / (_HEIGHT - 1)
        axis[row] = format_number(10**value if is_log else value)
    return cells, axis


def _span(values: Sequence[float]) -> Point:
    """The lowest and highest value, and some room where they are one."""
    low, high = min(values), max(values)
    room = abs(low) * 0.05 or 0.5
    return (low, high) if high > low else (low - room, high + room)


class _Cells:
    """Dots on a canvas whose letters have `dots` columns and rows of them each."""

    def __init__(self, width: int, height: int, dots: tuple[int, int], in_colour: bool) -> None:
        self._size = width, height
        self._dots = dots
        self._in_colour = in_colour
        self._cells: dict[tuple[int, int], tuple[int, int]] = {}  # dots and curve by row and column

    def draw(self, number: int, points: Sequence[Point]) -> None:
        """A line through points from (0, 0), lower left, to (1, 1); NaN is a gap."""
        width, height = self._size
        on_canvas = [(x * (width - 1), y * (height - 1)) for x, y in points]
        for x, y in on_canvas:
            self._dot(number, x, y)
        for (x, y), (next_x, next_y) in pairwise(on_canvas):
            if math.isnan(y) or math.isnan(next_y):
                continue
            n_dots = math.ceil(max(abs(next_x - x), abs(next_y - y)))
            for index in range(1, n_dots):
                share = index / n_dots
                self._dot(number, x + share * (next_x - x), y + share * (next_y - y))

    def _dot(self, number: int, x: float, y: float) -> None:
        if math.isnan(y):
            return
        width, height = self._dots
        column, row = round(x), self._size[1] - 1 - round(y)
        place = row // height, column // width
        bit = _BRAILLE[row % height][column % width]
        self._cells[place] = self._cells.get(place, (0, 0))[0] | bit, number

    def rows(self) -> Iterator[str]:
        """The lines, from the top."""
        columns, n_rows = self._size[0] // self._dots[0], self._size[1] // self._dots[1]
        for row in range(n_rows):
            yield "".join(
                self._letter(*self._cells[row, column]) if (row, column) in self._cells else " "
                for column in range(columns)
            ).rstrip()

    def _letter(self, dots: int, number: int) -> str:
        if not self._in_colour:
            return _LETTERS[number % len(_LETTERS)]
        return _coloured(chr(0x2800 + dots), number)

    def mark(self, number: int) -> str:
        """What a curve is drawn with."""
        return _coloured("\N{BRAILLE PATTERN DOTS-36}" * 2, number) if self._in_colour else self._letter(0, number)


def _coloured(text: str, number: int) -> str:
    return f"\033[{_COLOURS[number % len(_COLOURS)]}m{text}\033[0m"
