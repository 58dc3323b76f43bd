"""What the pages show is true: their Python runs, top to bottom, as a reader would paste it."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import sklearn.utils  # noqa: F401 (sets an environment variable when first imported, which no test may)

from tests.docs.pages import PAGES, ROOT, blocks, name
from tests.examples.launch import imported, metric, run_script

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.mark.pitfall(17)
@pytest.mark.pitfall(52)
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    # Blocks of one page share a namespace, as they would in one file.
    namespace: dict[str, Any] = {"__name__": "__main__"}
    programs = [block for block in blocks(page) if block.language == "python"]
    assert programs
    for block in programs:
        # Line numbers of a traceback are those of the page, whose own asserts are the test.
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in {"python", "bash", "text"}, f"{name(page)}:{block.line}"


def test_the_readmes_first_trainer_learns_the_same_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    script = two / "train.py"
    script.write_text(next(block for block in blocks(ROOT / "README.md") if block.language == "python").code)
    monkeypatch.chdir(one)
    runpy.run_path(str(script), run_name="__main__")
    run_script(script, cwd=two, n_processes=2)
    alone, together = (list(metric(each / "runs/train/default/one", "train/loss").values()) for each in (one, two))
    assert len(alone) == 13  # every 10 of 128 steps, and the last
    assert together == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < 0.3 * alone[0]


@pytest.mark.parametrize("page", ["first-steps", "fine-tuning"])
def test_a_notebook_has_the_cells_of_its_page(page: str) -> None:
    """Which run above; `python tools/notebooks.py` writes them."""
    path = ROOT / f"examples/notebooks/{page}.ipynb"
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [block.code.strip("\n") for block in blocks(ROOT / f"docs/{page}.md") if block.language == "python"]
    with imported("tools.notebooks") as tool:
        assert path.read_text() == tool.notebook(page)
