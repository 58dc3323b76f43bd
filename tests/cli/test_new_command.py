"""`dream-trainer new`: projects that train, and names that are refused."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api import EXAMPLES, LAUNCH, main
from tests.examples.launch import ROOT


def packages_of(program: str) -> set[str]:
    """Top-level names of what it imports, anywhere."""
    nodes = list(ast.walk(ast.parse(program)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {module.split(".")[0] for module in modules}


@pytest.mark.parametrize("template", EXAMPLES)
def test_a_project_is_the_example_renamed(template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-project").mkdir()  # an empty directory is taken
    assert main(["new", "my-project", "--from", template]) == 0
    said = capsys.readouterr().out
    project = tmp_path / "my-project"
    program, *modules = EXAMPLES[template]  # type: ignore[index]
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert files == {"train.py", "test_train.py", *(Path(path).name for path in modules), *LAUNCH}
    assert os.access(project / "launch/slurm.sh", os.X_OK) == os.access(ROOT / "examples/launch/slurm.sh", os.X_OK)

    texts = {name: (project / name).read_text() for name in files}
    for name, text in texts.items():
        assert not re.search(r"examples/|project=\"examples\"", text), name
    assert 'project="my-project"' in texts["train.py"]
    assert "python train.py" in texts["train.py"]
    # Except for these two it is the example, line by line.
    example = (ROOT / "examples" / program).read_text()
    assert texts["train.py"] == example.replace(f"examples/{program}", "train.py").replace('"examples"', '"my-project"')
    assert "check_trainer(" in texts.pop("test_train.py")
    imported = {name for path, text in texts.items() if path.endswith(".py") for name in packages_of(text)}
    needed = imported - sys.stdlib_module_names - {Path(name).stem for name in files}
    needed -= {"torch", "numpy", "dream_trainer"}
    install = re.search(r"cd my-project; pip install (.*); python train.py\n", said)
    assert needed == set(install[1].replace("scikit-learn", "sklearn").split())


def test_a_project_trains(tmp_path: Path) -> None:
    assert main(["new", "mine", "--from", "gpt"]) == 0
    sizes = "--model.n-layers 2 --model.n-heads 2 --model.dim 16 --model.window 32 --sample-bytes 8"
    arguments = f"{sizes} --training-parameters.max-steps 2 --device-parameters.device cpu".split()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "train.py", *arguments]
    done = subprocess.run(line, cwd=tmp_path / "mine", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["", "../up", "a/b", "1st", "-x", "with space", "a.b"])
def test_a_name_that_cannot_be_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--", name]) == 2
    assert f"{name!r} cannot be a project's name" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file", "full directory"])
def test_what_is_there_stays(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / ("mine" if kind == "file" else "mine/notes.txt")
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    assert main(["new", "mine"]) == 2
    assert "mine exists and is not an empty directory" in capsys.readouterr().err
    assert kept.read_text() == "mine"
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1


def test_an_unknown_template_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mine", "--from", "diffuse"]) == 2
    said = capsys.readouterr()
    assert "diffusion" in said.err + said.out
