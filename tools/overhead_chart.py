"""Draws docs/images/overhead.svg from the table "Compared with other trainers" in docs/measurements.md.

python tools/overhead_chart.py
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs/measurements.md"
CHART = ROOT / "docs/images/overhead.svg"
TASKS = {"bare, map": "bare loop", "everyday, map": "with validation, logs, schedule and bar"}
_LABEL, _BAR, _LINE, _WIDTH = 110, 170, 20, 640  # pixels: the names, the length of 1.0, a row, the whole


def measured() -> dict[str, dict[str, float]]:
    """The medians by task and trainer."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.read_text().splitlines()]
    (header,) = (row for row in rows if row[:2] == ["", "plain"])
    return {
        row[0]: {name: float(cell.split()[0]) for name, cell in zip(header[2:], row[2:], strict=True)}
        for row in rows
        if row[0] in TASKS and len(row) == len(header)
    }


def chart() -> str:
    """The chart as SVG, readable on light and dark pages."""
    parts, top = [], 18
    for task, values in measured().items():
        parts.append(
            f'<text x="0" y="{top}" font-weight="bold">CPU time of a step, {TASKS[task]} (plain loop = 1)</text>'
        )
        for name, value in sorted(values.items(), key=lambda item: item[1]):
            top += _LINE
            fill = "#4051b5" if name == "Dream Trainer" else "#9aa4b2"
            length = value * _BAR
            parts.append(f'<text x="0" y="{top}">{name}</text>')
            parts.append(f'<rect x="{_LABEL}" y="{top - 11}" width="{length:.0f}" height="13" fill="{fill}"/>')
            parts.append(f'<text x="{_LABEL + length + 6:.0f}" y="{top}">{value:.2f}</text>')
        top += _LINE + 12
    style = f'width="{_WIDTH}" height="{top - 20}" font-family="sans-serif" font-size="13" fill="#768390"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top - 20}" {style}>\n{body}\n</svg>\n'


if __name__ == "__main__":
    CHART.write_text(chart())
