"""Pages, docstrings and messages are plain English, as far as counting tells, and pages are short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name
from tests.examples.launch import imported

# Marks per 1,000 words.
CODE = {"docstrings": 1, "messages": 1, "comments": 1}
LONG_SENTENCES = 0.08
LONG_PAGES = {"CHANGELOG.md": 10_000}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_short_and_has_few_marks_and_few_long_sentences(page: Path) -> None:
    assert len(page.read_text().split()) <= LONG_PAGES.get(name(page), 1_500), "split it by task"
    with imported("tools.prose_lint") as lint:
        found = lint.count(lint.prose(page.read_text()))
    assert found.marks <= max(1, 4 * found.words / 1000), "tools/prose_lint.py --show"
    assert found.long <= max(1, LONG_SENTENCES * found.sentences), "tools/prose_lint.py --show"


@pytest.mark.parametrize("part", CODE)
def test_the_text_of_the_code_has_no_more_marks_than_before(part: str) -> None:
    with imported("tools.prose_lint") as lint:
        read: Callable[[str], list[str]] = getattr(lint, part)
        files = sorted((ROOT / "dream_trainer").rglob("*.py"))
        found = lint.count("\n\n".join(lint.prose(text) for file in files for text in read(file.read_text())))
    assert found.per_thousand <= CODE[part], "tools/prose_lint.py --show"
    assert found.long_share <= LONG_SENTENCES


def test_the_counter_counts_as_by_hand() -> None:
    with imported("tools.prose_lint") as lint:
        text = lint.prose("# What is a heading\n\nWhat is returned is logged. It is kept by `name`, or by name.\n")
        found = lint.count(text + "\n\n" + " ".join(["word"] * 31) + ".")
        assert found == lint.Count(words=44, sentences=3, marks=2, long=1)
        code = 'def f():\n    """Doc of f here."""\n    # why this\n    # is so\n    return f"a message of {x} words"\n'
        assert lint.docstrings(code) == ["Doc of f here."]
        assert lint.comments(code) == ["why this is so"]
        assert lint.messages(code) == ["a message of CODE words"]
