"""Every reference of the repository leads somewhere: files, anchors, tests, modules; and none leads outside."""

import importlib
import re
from pathlib import Path

import pytest

from tests.docs import references
from tests.docs.pages import PAGES, ROOT, links, name

# Files that pages and docstrings speak of and that are the reader's own.
READERS_OWN = {"train.py", "test_train.py", "run.yaml"}


def is_there(reference: references.Reference) -> bool:
    path = references.resolve(reference)
    if path is None:
        return reference.target in READERS_OWN
    if reference.part.startswith("::"):
        return reference.part[2:] in references.functions(path)
    return not reference.part or reference.part[1:] in references.anchors(path)


@pytest.mark.pitfall(52)
def test_every_reference_leads_somewhere() -> None:
    found = [reference for source in references.everything() for reference in references.file_references(source)]
    assert len(found) > 200
    lost = [str(reference) for reference in found if not is_there(reference)]
    assert not lost, "\n".join(lost)


def test_every_link_leads_to_a_file_and_a_heading_that_are_there() -> None:
    lost = []
    for page in PAGES:
        for link in links(page):
            target, _, anchor = link.partition("#")
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in references.anchors(file)):
                lost.append(f"{name(page)} links to {link}")
    assert not lost


def test_every_name_of_the_package_that_is_written_out_exists() -> None:
    found = [reference for source in references.everything() for reference in references.name_references(source)]
    assert found
    assert not [str(reference) for reference in found if not exists(reference.target)]


def exists(dotted: str) -> bool:
    """Whether the name is that of a module, or of something in one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        place = Path(ROOT, *parts[:end])
        if place.is_dir() or place.with_suffix(".py").is_file():
            found = importlib.import_module(".".join(parts[:end]))
            try:
                for part in parts[end:]:
                    found = getattr(found, part)
            except AttributeError:
                return False
            return True
    return False


def test_no_section_of_a_paper_is_cited_that_is_not_in_the_repository() -> None:
    cited = [
        f"{name(source)} cites {found}"
        for source in references.everything()
        for found in re.findall(r"\b[A-Z]{4,}\b section \w+", references.words(source))
    ]
    assert not cited
