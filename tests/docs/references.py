"""What the repository's text refers to: files, anchors in pages, tests, and names of the package."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import PAGES, ROOT, name, prose

FOLDERS = ("dream_trainer", "examples", "tests", "tools")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
SCRIPTS = [
    *sorted((ROOT / "tools").glob("*.sh")),
    *sorted((ROOT / "examples").rglob("*.sh")),
    *sorted((ROOT / ".github").rglob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "pyproject.toml",
    ROOT / "tools/constraints.txt",
]
_FILE = re.compile(r"(?<![\w./*<>{}~-])([\w-][\w./-]*\.(?:py|md|sh|toml|yml|yaml))(#[\w-]+|::\w+)?(?![\w/*])")
_NAME = re.compile(r"`(dream_trainer(?:\.\w+)+)`")


class Reference(NamedTuple):
    """One mention of something that ought to be there."""

    source: Path
    target: str
    part: str
    """`#anchor` of a page, `::function` of a test, or nothing."""

    def __str__(self) -> str:
        return f"{name(self.source)} refers to {self.target}{self.part}"


@cache
def words(source: Path) -> str:
    """What a reader reads in prose: a page without its blocks; a module's docstrings and comments; other comments."""
    text = source.read_text()
    if source.suffix == ".md":
        return prose(source)
    if source.suffix == ".py":
        return "\n".join(_docstrings_and_comments(text))
    return "\n".join(re.findall(r"(?:^|\s)#(.*)$", text, re.MULTILINE))


def file_references(source: Path) -> Iterator[Reference]:
    """Every file that `source` names in its words."""
    text = re.sub(r"https?://\S+", "", words(source))
    for found in _FILE.finditer(text):
        yield Reference(source, found[1], found[2] or "")


def name_references(source: Path) -> Iterator[Reference]:
    """Every dotted name of the package that `source` has in backticks."""
    for found in _NAME.finditer(words(source)):
        yield Reference(source, found[1], "")


def resolve(reference: Reference) -> Path | None:
    """The file that is meant: below the source's folder, the repository, the package or the tests; None if none is."""
    for folder in (reference.source.parent, ROOT, ROOT / "dream_trainer", ROOT / "tests", ROOT / "docs"):
        path = folder / reference.target
        if path.is_file():
            return path
    return None


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a `#` may name in the page: its headings, as GitHub spells them, and anchors set by hand."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    spelt = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return frozenset(spelt | set(re.findall(r'<a id="([^"]+)">', page.read_text())))


@cache
def functions(module: Path) -> frozenset[str]:
    """Names of the functions that the module defines at its top."""
    return frozenset(node.name for node in ast.parse(module.read_text()).body if isinstance(node, ast.FunctionDef))


def everything() -> list[Path]:
    """All that is searched for references: pages, modules, scripts and configurations."""
    return [*PAGES, *SOURCES, *SCRIPTS]


def _docstrings_and_comments(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        # Docstrings of fields stand alone after them, as those of modules, classes and functions do.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
