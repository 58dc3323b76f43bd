"""`dream-trainer plot --terminal` and `--html`: the right values at the right places, read back from text and page."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dream_trainer.cli.curves import Curve
from dream_trainer.cli.html_figure import html_figure
from dream_trainer.cli.main import main
from dream_trainer.cli.terminal_figure import terminal_figure
from tests.cli.test_plot_command import a_run

RISING = Curve("run", "train/loss", tuple(range(24)), tuple(range(24)))
FALLING = Curve("run", "val/loss", (0, 23), (23.0, 0.0))


def drawn(*curves: Curve, log_y: bool = False, in_colour: bool = False, smooth: float = 0.0) -> list[str]:
    """Lines of a panel of 12 rows and 24 columns, without what stands before and after it."""
    text = terminal_figure({"loss": list(curves)}, x="steps", smooth=smooth, log_y=log_y, width=36, in_colour=in_colour)
    return [line.partition("│")[2] for line in text.splitlines() if "│" in line]


def letters(rows: list[str]) -> dict[tuple[int, int], str]:
    """What is drawn, by row from below and column."""
    assert len(rows) == 12
    places = ((11 - number, column, letter) for number, row in enumerate(rows) for column, letter in enumerate(row))
    return {(row, column): letter for row, column, letter in places if letter != " "}


def test_a_line_in_the_terminal_is_where_its_values_are() -> None:
    marks = letters(drawn(RISING))
    assert {column for _, column in marks} == set(range(24))
    # A letter stands for what lies within half a row and half a column of it.
    assert all(abs(row - 11 * column / 23) <= 0.5 + 0.5 * 11 / 23 for row, column in marks)
    marks = letters(drawn(RISING, FALLING))
    assert (marks[11, 0], marks[0, 23], marks[0, 0], marks[11, 23]) == ("+", "+", "*", "*")


def test_in_colour_a_line_is_made_of_braille_dots() -> None:
    lit = set()
    for number, row in enumerate(drawn(RISING, in_colour=True)):
        for column, letter in enumerate(re.sub("\033\\[[0-9]+m", "", row)):
            bits = ord(letter) - 0x2800 if letter != " " else 0
            # Unicode numbers the dots 1-3 and 7 of the left column, 4-6 and 8 of the right one.
            for dot, (x, y) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]):
                if bits >> dot & 1:
                    lit.add((2 * column + x, 47 - (4 * number + y)))
    assert lit == {(x, x) for x in range(48)}


def test_nan_is_a_gap_in_the_terminal_and_a_logarithm_is_a_straight_line() -> None:
    values = tuple(math.nan if 8 <= place < 16 else 5.0 for place in range(24))
    assert {row for row in drawn(Curve("run", "x", tuple(range(24)), values)) if row} == {"*" * 8 + " " * 8 + "*" * 8}
    powers = Curve("run", "x", tuple(range(24)), tuple(10.0**place for place in range(24)))
    assert drawn(powers, log_y=True) == drawn(RISING)
    nothing = Curve("run", "x", (1, 2), (math.nan, math.nan))
    assert not any(drawn(nothing))


def test_the_terminal_says_names_and_ends_of_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/run", "b/run"):
        a_run(tmp_path / name)
    runs = [str(tmp_path / "a/run"), str(tmp_path / "b/run")]
    assert main(["plot", *runs, "--metrics", "*loss", "--terminal", "--x", "samples"]) == 0
    out = capsys.readouterr().out
    for expected in ("* a/run: train/loss", "x b/run: val/loss", "         1 │", "    0.2500 │", " 8  ", "32 samples"):
        assert expected in out
    assert "\033" not in out
    assert not list(Path().glob("plot.*"))


def test_the_page_holds_the_values_and_nothing_of_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/run", "b/run"):
        a_run(tmp_path / name)
    assert main(["plot", "a/run", "b/run", "--html", "out/page.html", "--smooth", "0.5"]) == 0
    assert capsys.readouterr().out.endswith(": out/page.html\n")
    page = Path("out/page.html").read_text()
    assert set(re.findall(r"https?://[^\"]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|script) [^>]*(src|href)", page)
    data = json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])  # type: ignore[index]
    assert (data["title"], data["unit"], data["smooth"]) == ("a/run and b/run", "optimizer steps", 0.5)
    assert [panel["title"] for panel in data["panels"]][:2] == ["loss", "accuracy"]
    curves = {curve["name"]: curve for curve in data["panels"][0]["curves"]}
    assert curves["b/run: train/loss"]["x"] == [1, 2, 3, 4]
    assert curves["b/run: train/loss"]["y"] == [1.0, 0.5, 1 / 3, 0.25]
    assert curves["b/run: val/loss"]["isValidation"]
    assert len({(curve["colour"], curve["dashes"]) for curve in curves.values()}) == 4


def test_a_name_cannot_end_the_pages_script() -> None:
    named = Curve("run", "</script><b>", (1, 2), (1.0, math.nan))
    page = html_figure({"loss": [named]}, x="steps", smooth=0.0, log_y=False)
    assert page.count("</script>") == 1
    assert "[1.0, null]" in page


def test_neither_needs_matplotlib(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    code = """
import sys
sys.modules["matplotlib"] = None
from dream_trainer.cli.main import main
assert main(["plot", "run", "--terminal", "--html", "page.html"]) == 0
assert main(["plot", "run"]) == 2
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "draw with --terminal or --html FILE" in done.stderr
