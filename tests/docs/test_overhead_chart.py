"""The README's chart shows the figures of docs/measurements.md."""

import re

from tests.examples.launch import imported


def test_the_chart_is_drawn_from_the_measured_table() -> None:
    with imported("tools.overhead_chart") as tool:
        assert tool.CHART.read_text() == tool.chart(), "run tools/overhead_chart.py"
        table = tool.TABLE.read_text()
    shown = re.findall(r">(\d\.\d\d)<", tool.CHART.read_text())
    rows = [line for line in table.splitlines() if line.startswith(("| bare, map", "| everyday, map"))]
    expected = [sorted(re.findall(r"(\d\.\d\d) \(", row)) for row in rows]
    assert len(shown) == 10
    assert [shown[:5], shown[5:]] == expected
