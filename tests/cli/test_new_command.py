"""`dream-trainer new`: projects that train and pass their own tests, and names that are refused."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dream_trainer.cli.main import main
from dream_trainer.cli.project import LAUNCH, SOURCES
from tests.examples.launch import ROOT

# Each is begun and tested with --all.
TEMPLATES = [pytest.param(name, marks=[] if name == "diffusion" else pytest.mark.slow) for name in SOURCES]


def packages_of(program: str) -> set[str]:
    """Top-level names of what it imports, anywhere."""
    nodes = list(ast.walk(ast.parse(program)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {module.split(".")[0] for module in modules}


@pytest.mark.parametrize("template", SOURCES)
def test_a_project_is_the_example_under_its_own_name(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-project").mkdir()  # an empty directory is taken
    assert main(["new", "my-project", "--from", template]) == 0
    assert (
        "cd my-project; pip install -r requirements.txt; pytest; python train.py --config run.yaml"
        in capsys.readouterr().out
    )
    project = tmp_path / "my-project"
    source = SOURCES[template]  # type: ignore[index]
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    around = {"README.md", "requirements.txt", "test_train.py", "run.yaml", ".gitignore", *LAUNCH}
    assert files == {"train.py", *(Path(path).name for path in source.beside)} | around
    assert os.access(project / "launch/slurm.sh", os.X_OK) == os.access(ROOT / "examples/launch/slurm.sh", os.X_OK)

    texts = {name: (project / name).read_text() for name in files}
    for name, text in texts.items():
        assert not re.search(r"examples/|project=\"examples\"|<[A-Z]+>", text), name
    assert 'project="my-project"' in texts["train.py"]
    assert "python train.py" in texts["train.py"]
    # But for these two it is the example, line by line.
    example = (ROOT / "examples" / source.program).read_text()
    program = f"examples/{source.program}"
    assert texts["train.py"] == example.replace(program, "train.py").replace('"examples"', '"my-project"')
    imported = {name for path, text in texts.items() if path.endswith(".py") for name in packages_of(text)}
    needed = imported - sys.stdlib_module_names - {Path(name).stem for name in files} - {"torch", "numpy"}
    named = texts["requirements.txt"].replace("scikit-learn", "sklearn").replace("-", "_").split()
    assert needed == set(named)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_project_passes_its_own_tests(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine", "--from", template]) == 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "mine",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    assert not (tmp_path / "mine/runs").exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", "1st", "-x", "with space", "a.b"])
def test_a_name_that_cannot_be_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "--", name]) == 2
    assert f"{name!r} cannot be a project's name" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file", "full directory"])
def test_what_is_there_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / ("mine" if kind == "file" else "mine/notes.txt")
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    assert main(["new", "mine"]) == 2
    assert "mine exists already and is not an empty directory" in capsys.readouterr().err
    assert kept.read_text() == "mine"
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1


def test_an_unknown_template_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mine", "--from", "diffuse"]) == 2
    said = capsys.readouterr()
    assert "diffusion" in said.err + said.out
