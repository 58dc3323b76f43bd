"""Writes pages of docs/ as notebooks into examples/notebooks: `python tools/notebooks.py`. A test compares them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples/notebooks"
PAGES = ("first-steps", "fine-tuning")
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)")


def notebook(page: str) -> str:
    """A page's text, with a code cell for each block of Python; links lead to the other pages."""
    parts = _PYTHON.split((ROOT / f"docs/{page}.md").read_text())
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        is_code, text = number % 2 == 1, part.strip("\n")
        if not is_code:
            text = _LINK.sub(r"\1../../docs/", text)
        if text:
            cell = {"cell_type": "code" if is_code else "markdown", "id": f"{page}-{number}", "metadata": {}}
            cell["source"] = text.splitlines(keepends=True)
            cells.append(cell | ({"execution_count": None, "outputs": []} if is_code else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        (FOLDER / f"{name}.ipynb").write_text(notebook(name))
