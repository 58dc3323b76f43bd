"""The pages of pitfalls and the marks `pitfall(n)` of the tests say the same."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

PAGES = (ROOT / "docs/pitfalls.md", ROOT / "docs/pitfalls/state-and-ranks.md")
MARK = re.compile(r"pytest\.mark\.pitfall\(([\d, ]+)\)")


def entries() -> dict[int, list[str]]:
    """By number, the tests that the pages name for it, as `file::function`."""
    parts = re.split(r"^- \*\*(\d+)\.\*\* ", "\n".join(page.read_text() for page in PAGES), flags=re.MULTILINE)
    numbers = [int(number) for number in parts[1::2]]
    assert numbers == sorted(set(numbers)), "each number once, and in order"
    return {
        number: re.findall(r"^  - `([\w/.]+::\w+)`$", text, re.MULTILINE)
        for number, text in zip(numbers, parts[2::2], strict=True)
    }


def marked(path: Path) -> Iterator[tuple[str, set[int]]]:
    """Each test of a file with the numbers of its marks, those of the whole file too."""
    tree = ast.parse(path.read_text())
    of_file = set[int]().union(*(numbers(ast.unparse(node)) for node in tree.body if isinstance(node, ast.Assign)))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, of_file.union(*(numbers(ast.unparse(decorator)) for decorator in node.decorator_list))


def numbers(source: str) -> set[int]:
    """Those of the marks in `source`: `pitfall(2)`, `pitfall(2, 6)`."""
    return {int(number) for several in MARK.findall(source) for number in several.split(",")}


def marks() -> dict[str, set[int]]:
    """The numbers of each test of the repository, as `file::function`."""
    return {
        f"{path.relative_to(ROOT).as_posix()}::{test}": numbers
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for test, numbers in marked(path)
    }


def test_every_number_of_a_mark_has_an_entry() -> None:
    assert set().union(*marks().values()) <= entries().keys()


def test_every_entry_names_tests_that_bear_its_mark() -> None:
    known = marks()
    wrong = [
        f"{number}: {test}{moved(test, known)}"
        for number, tests in entries().items()
        for test in tests or ["no test"]
        if number not in known.get(test, set())
    ]
    assert not wrong, "\n".join(wrong)


def moved(test: str, known: dict[str, set[int]]) -> str:
    """Where a test of that name is now, if it is somewhere else."""
    places = [place for place in known if place.endswith(test[test.find("::") :]) and place != test]
    return f" (now {', '.join(places)})" if places else ""
