"""What checkers and editors see of the package, from a user's code: both mypy and pyright run on it.

Typed code of a user's is without errors in strict mode, and the types that it asserts are the ones that are inferred;
mistakes are found, each where it is; what the pages show is without errors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, name

HERE = Path(__file__).parent
MISTAKES = HERE / "mistakes.py"
# The other pages index into an nn.Sequential, hand lists to a DataLoader or call what may be None: that runs, and
# PyTorch's types take it for a mistake.
CHECKED_PAGES = [
    "README.md",
    "docs/api/base_trainer.md",
    "docs/callbacks.md",
    "docs/callbacks/early-stopping.md",
    "docs/callbacks/every.md",
    "docs/callbacks/memory.md",
    "docs/callbacks/swa.md",
    "docs/callbacks/throughput.md",
    "docs/callbacks/weight-transfer.md",
    "docs/callbacks/your-own.md",
    "docs/ema.md",
    "docs/evaluation.md",
    "docs/precision.md",
    "docs/context-parallel.md",
    "docs/pipeline-parallel.md",
    "docs/tensor-parallel.md",
]
# As users write it: without types of their own. Options that reach PyTorch's modules too would have them read again.
UNTYPED = """
[[tool.mypy.overrides]]
module = [{modules}]
disallow_untyped_defs = false
disallow_incomplete_defs = false
disallow_untyped_calls = false
disallow_any_generics = false
disallow_subclassing_any = false
disallow_untyped_decorators = false
warn_return_any = false
"""

Errors = dict[tuple[str, int], str]
"""What a checker said, by file and line."""


def mypy(cache: Path, *arguments: str) -> Errors:
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(cache), "--no-error-summary", *arguments]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    lines = re.findall(r"^(.+?):(\d+): error: (.*)$", result.stdout, re.MULTILINE)
    return {(Path(file).name, int(line)): message for file, line, message in lines}


def pyright(directory: Path, *files: Path) -> Errors:
    config = {"typeCheckingMode": "standard", "pythonVersion": "3.11", "extraPaths": [str(ROOT)], "include": []}
    project = directory / "pyrightconfig.json"
    project.write_text(json.dumps(config | {"include": [str(file) for file in files]}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(project)]
    result = subprocess.run([*command, "--pythonpath", sys.executable], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    found = json.loads(result.stdout)["generalDiagnostics"]
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in found
        if each["severity"] == "error"
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the project's own check has learned of PyTorch, where it ran before: most of the time goes there."""
    directory = tmp_path_factory.mktemp("mypy") / "cache"
    known = ROOT / ".mypy_cache"
    if known.is_dir():
        shutil.copytree(known, directory)
    return directory


def marked() -> list[tuple[str, int]]:
    lines = MISTAKES.read_text().splitlines()
    return [(MISTAKES.name, number) for number, line in enumerate(lines, start=1) if line.endswith("# error")]


def python_of(page: Path) -> str:
    """The page's Python as one file, each line where it is in the page."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What the pages show, as files of one folder."""
    directory, files = tmp_path_factory.mktemp("pages"), []
    for page in PAGES:
        if name(page) in CHECKED_PAGES:
            files.append(directory / name(page).replace("/", "_").replace(".md", ".py"))
            files[-1].write_text(python_of(page))
    assert len(files) == len(CHECKED_PAGES)
    return files


def test_mypy_infers_what_typed_user_code_asserts_and_finds_each_mistake_and_none_in_pages(
    cache: Path, pages: list[Path], tmp_path: Path
) -> None:
    config = tmp_path / "mypy.toml"
    own = re.findall(
        r"^\[+tool\.mypy.*?(?=^\[(?!\[?tool\.mypy)|\Z)", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    modules = ", ".join(f'"{file.stem}"' for file in pages)
    config.write_text("\n".join(own) + UNTYPED.format(modules=modules))
    files = [HERE / "typed_user_code.py", MISTAKES, *pages]
    found = mypy(cache, "--config-file", str(config), *map(str, files))
    assert sorted(found) == marked(), found


def test_pyright_infers_what_typed_user_code_asserts_and_finds_each_mistake_and_none_in_pages(
    pages: list[Path],
) -> None:
    found = pyright(pages[0].parent, HERE / "typed_user_code.py", MISTAKES, *pages)
    assert sorted(found) == marked(), found
