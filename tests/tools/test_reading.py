"""The page says how much one has to read to follow the code, and it is little."""

from tests.examples.launch import imported


def test_each_way_through_the_code_is_short_and_counted_right() -> None:
    with imported("tools.reading") as reading:
        ways, page = reading.ways(), reading.PAGE.read_text()
    section = page.partition("## What to read")[2].partition("\n## ")[0]
    assert len(ways) == len([line for line in section.splitlines() if line.startswith("| ")]) - 2
    for way in ways:
        assert len(way.files) <= 8, way.name
        assert way.lines() <= 1800, way.name
        assert abs(way.said - way.lines()) <= 100, f"{way.name}: {way.lines()} lines; run tools/reading.py"
