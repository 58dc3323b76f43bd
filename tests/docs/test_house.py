"""What contributors find: versions that agree, configurations that can be read, and pages that can be found."""

import re
import tomllib
from typing import Any

import pytest
from packaging.version import Version

import dream_trainer
from tests.docs.pages import PAGES, ROOT, links, name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_yaml(path: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the file")
    return yaml.safe_load((ROOT / path).read_text())


def test_the_version_stands_in_one_place_and_heads_the_changelog() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    changelog, version = (ROOT / "CHANGELOG.md").read_text(), Version(dream_trainer.__version__)
    newest = Version(re.findall(r"^## \[(\d\S*)\] - \d{4}-\d{2}-\d{2}$", changelog, re.MULTILINE)[0])
    assert version > newest if version.is_devrelease else version == newest
    assert ("## [Unreleased]" in changelog) == version.is_devrelease


def test_the_workflow_runs_the_tests_on_the_versions_that_are_named() -> None:
    job = read_yaml(".github/workflows/ci.yml")["jobs"]["tests"]
    matrix = job["strategy"]["matrix"]
    classifiers = [found.rpartition(" ")[2] for found in PROJECT["classifiers"] if "Python :: 3." in found]
    assert matrix["python"] == classifiers
    assert f"torch>={matrix['torch'][0].removesuffix('.0')}" in PROJECT["dependencies"]
    text = " ".join((ROOT / "docs/stability.md").read_text().split())
    torches = [version.removesuffix(".0") for version in matrix["torch"]]
    assert f"{classifiers[0]} to {classifiers[-1]} with PyTorch {', '.join(torches[:-1])} and {torches[-1]}" in text
    assert job["steps"][-1]["run"] == "bash tools/test.sh --torch ${{ matrix.torch }} --ci"


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
