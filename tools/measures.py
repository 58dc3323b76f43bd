"""Prints the structure measures that docs/baseline.md records: `python tools/measures.py [CHECKOUT]`."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

AXES = re.compile(r"pipeline|tensor_parallel|TensorParallel|context_parallel|ContextParallel|expert", re.IGNORECASE)
SHORT = 60


def modules_of(package: Path) -> dict[str, Path]:
    """The package's files by module name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def is_apart(file: Path) -> bool:
    """Whether a file is of `testing/` or `planning/`, which have a limit of their own, or of their tests."""
    return file.parts[0] in ("testing", "planning")


def imports(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Modules of the package that a file imports anywhere, for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in names or node.module in names:
                    yield inner if inner in names else node.module


def largest_cycle(edges: dict[str, set[str]]) -> int:
    """Size of the largest strongly connected component."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    sizes = [0]

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            place = stack.index(name)
            sizes.append(len(stack) - place)
            del stack[place:]

    sys.setrecursionlimit(10_000)
    for name in list(edges):
        if name not in index:
            visit(name)
    return max(sizes)


def takes_trainer(function: ast.FunctionDef) -> bool:
    """Whether an argument is called `trainer` or has a trainer's type (and not its config's)."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(
        a.arg == "trainer" or (a.annotation and re.search(r"Trainer\b", ast.unparse(a.annotation))) for a in arguments
    )


def measures(root: Path) -> dict[str, object]:
    """Each measure by its name."""
    package = root / "dream_trainer"
    modules = {name: file for name, file in modules_of(package).items() if not is_apart(file.relative_to(package))}
    apart = [file for file in package.rglob("*.py") if is_apart(file.relative_to(package))]
    texts = {name: file.read_text() for name, file in modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    names = set(modules)
    edges = defaultdict(set, {name: set(imports(tree, names)) - {name} for name, tree in trees.items()})
    importers: dict[str, set[str]] = defaultdict(set)
    for name, others in edges.items():
        for other in others:
            importers[other].add(name)
    plain = [name for name, file in modules.items() if file.name != "__init__.py"]
    folder = {name: name.rpartition(".")[0] for name in modules}
    alone = [n for n in plain if len(importers[n]) == 1 and folder[next(iter(importers[n]))] == folder[n]]
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    constructors = [
        node
        for name, tree in trees.items()
        if not name.startswith("dream_trainer.callbacks")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and takes_trainer(node)
    ]
    outside = [
        name for name in plain if name.split(".")[1] not in ("parallel", "config", "cli") and AXES.search(texts[name])
    ]
    tests = [f.read_text() for f in (root / "tests").rglob("*.py") if not is_apart(f.relative_to(root / "tests"))]
    everything = "\n".join(texts.values())
    return {
        "files of the package": len(modules),
        "lines of the package": sum(text.count("\n") for text in texts.values()),
        "lines of testing/ and planning/": sum(file.read_text().count("\n") for file in apart),
        "`raise` statements": sum(isinstance(node, ast.Raise) for node in nodes),
        "functions": sum(isinstance(node, ast.FunctionDef) for node in nodes),
        f"modules under {SHORT} lines": sum(texts[name].count("\n") < SHORT for name in plain),
        "modules with one importer, in their folder": len(alone),
        "modules in the largest folder": max(Counter(folder[name] for name in plain).values()),
        "largest import cycle, types included": largest_cycle(edges),
        "constructors that take a trainer": len(constructors),
        "`trainer._x`": len(re.findall(r"\btrainer\._[a-z]", everything)),
        "files that name an axis": len(outside),
        "stack walks": len(re.findall(r"_getframe|inspect\.stack|currentframe", everything)),
        "`WeakKeyDictionary` and `WeakTensorKeyDictionary`": len(re.findall(r"Weak\w*KeyDictionary\(", everything)),
        "`global` statements": sum(isinstance(node, ast.Global) for node in nodes),
        "files that import ctypes": sum("import ctypes" in text for text in texts.values()),
        "files of tests": len(tests),
        "lines of tests": sum(text.count("\n") for text in tests),
        "test functions": sum(len(re.findall(r"^ *def test_", text, re.MULTILINE)) for text in tests),
    }


if __name__ == "__main__":
    for measure, value in measures(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent).items():
        print(f"| {measure} | {value} |")
