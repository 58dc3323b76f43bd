"""The site builds without a warning, has every public name, and finds what is searched for."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name
from tests.docs.questions import QUESTIONS
from tests.examples.launch import imported


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    with imported("tools.site") as tools:
        for room, names in tools.public_names().items():
            page = (site / "reference" / f"{room}.html").read_text()
            assert names
            assert [found for found in names if f'id="{found}"' not in page] == []


def test_every_page_of_the_repository_is_found_by_search_and_listed_for_language_models(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    pages = {document["location"].partition("#")[0] for document in index["docs"]}
    listed = (site / "llms.txt").read_text()
    with imported("tools.site") as tools:
        for page in PAGES:
            location = tools.site_path(page).removesuffix(".md") + ".html"
            assert location in pages, name(page)
            assert f"]({location}): " in listed, name(page)


def test_a_page_asks_no_other_host_for_anything(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        for part in ('src="http', 'src="//', '<link rel="stylesheet" href="http', "@import"):
            assert part not in text, f"{page.name}: {part}"


def test_pages_that_llms_txt_lists_answer_thirty_questions(site: Path) -> None:
    for asked, page, answer in QUESTIONS:
        article = (site / page).with_suffix(".html").read_text().partition("<article")[2].partition("</article>")[0]
        text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", article)).split())
        assert not [part for part in answer if part not in text], asked
