"""What contributors find: versions that agree, configurations that can be read, and pages that can be found."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import dream_trainer
from tests.docs.pages import PAGES, ROOT, links, name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_yaml(path: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the file")
    return yaml.safe_load((ROOT / path).read_text())


def test_the_version_stands_in_one_place_and_heads_the_changelog() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    released = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == dream_trainer.__version__


def test_importing_the_package_imports_nothing_but_what_makes_names_lazy() -> None:
    code = (
        "import sys, importlib; before = set(sys.modules); import dream_trainer; dream_trainer.__version__\n"
        "print(*sorted(n for n in set(sys.modules) - before if n.startswith(('dream', 'torch', 'importlib.m'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["dream_trainer", "dream_trainer.lazy_names", "dream_trainer.version"]


def test_the_workflow_runs_the_tests_on_the_versions_that_are_named() -> None:
    job = read_yaml(".github/workflows/ci.yml")["jobs"]["tests"]
    matrix = job["strategy"]["matrix"]
    classifiers = [found.rpartition(" ")[2] for found in PROJECT["classifiers"] if "Python :: 3." in found]
    assert matrix["python"] == classifiers
    assert f"torch>={matrix['torch'][0].removesuffix('.0')}" in PROJECT["dependencies"]
    text = " ".join((ROOT / "docs/stability.md").read_text().split())
    torches = [version.removesuffix(".0") for version in matrix["torch"]]
    assert f"{classifiers[0]} to {classifiers[-1]} with PyTorch {', '.join(torches[:-1])} and {torches[-1]}" in text
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash tools/test.sh --torch ${{ matrix.torch }}"]


def test_another_pytorch_than_the_pinned_one_has_an_environment_of_its_own(tmp_path: Path) -> None:
    """With a python that only tells its arguments."""
    (tmp_path / "tools").mkdir()
    for file in ("pyproject.toml", "tools/constraints.txt"):
        (tmp_path / file).write_text((ROOT / file).read_text())
    for folder in (".venv", ".venv-2.11.0"):
        python = tmp_path / folder / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\nfor last; do :; done\ngrep "^torch==" "$last"\necho "into $0"\n')
        python.chmod(0o755)

    def installs(torch: str) -> list[str]:
        code = f"source {ROOT}/tools/environment.sh; use_torch {torch}; install dev"
        command = ["bash", "-euo", "pipefail", "-c", code]
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[1:]

    pinned = re.findall(r"^torch==(\S+)$", (ROOT / "tools/constraints.txt").read_text(), re.MULTILINE)[0]
    assert installs(pinned) == [f"torch=={pinned}", "into .venv/bin/python"]
    assert installs(pinned) == []  # nothing to do
    assert installs("2.11.0") == ["torch==2.11.0", "into .venv-2.11.0/bin/python"]
    assert installs("2.11.0") == []
    assert installs(pinned) == []


def test_the_hooks_before_a_commit_run_what_the_tests_script_runs() -> None:
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local", "what is fetched is not pinned"
    script = (ROOT / "tools/test.sh").read_text()
    for hook in repository["hooks"]:
        assert re.search(rf"^ *{re.escape(hook['entry'])}( |$)", script, re.MULTILINE), hook["id"]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
        ahead += [target for target in targets if target.suffix == ".md" and target not in reached]
    assert not [name(page) for page in PAGES if page.resolve() not in reached]
