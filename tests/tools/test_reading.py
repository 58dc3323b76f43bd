"""The page says how much one has to read to follow the code, and it is little."""

from __future__ import annotations

from tests.examples.launch import imported


def test_each_way_through_the_code_is_short_and_counted_right() -> None:
    with imported("tools.reading") as reading:
        ways = reading.ways()
    assert len(ways) >= 4
    for way in ways:
        assert len(way.files) <= 8, way.name
        assert way.lines() <= 1500, way.name
        assert abs(way.said - way.lines()) <= 100, f"{way.name}: {way.lines()} lines; run tools/reading.py"
