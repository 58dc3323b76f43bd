"""What is published: the same archives from each build, whole, and a package that does nothing by being imported."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.api import EXAMPLES, LAUNCH

ROOT = Path(__file__).parent.parent
NOT_PUBLISHED = {".ci", ".gitattributes"}

WATCHED = """
import sys, threading
import torch  # what importing it does is its own

acts = []
def watch(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.fork", "os.posix_spawn", "os.exec", "os.system", "_thread.")):
        acts.append((event, repr(arguments)[:200]))
sys.addaudithook(watch)

import dream_trainer as dt, dream_trainer.callbacks, dream_trainer.config, dream_trainer.data, dream_trainer.loggers
if sys.argv[1:] == ["all"]:
    for package in (dt, dt.callbacks, dt.config, dt.data, dt.loggers):
        for name in package.__all__:
            vars(package).get(name) or package.__getattr__(name)
print(acts or "nothing", threading.active_count())
"""


def build(directory: Path, umask: int) -> dict[str, bytes]:
    """The two archives by name, as `python -m hatchling build` makes them under some umask."""
    command = f"umask {umask:o}; exec {sys.executable} -m hatchling build --directory {directory}"
    subprocess.run(["bash", "-c", command], cwd=ROOT, check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("first")
    build(directory, 0o022)
    return directory


def test_two_builds_are_equal_bit_for_bit(archives: Path, tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in archives.iterdir()}
    assert build(tmp_path, 0o077) == first
    assert sorted(name.rpartition(".")[2] for name in first) == ["gz", "whl"]


def test_the_wheel_holds_the_package_and_the_examples_that_projects_begin_from(archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "dream-trainer = dream_trainer.cli.main:main" in archive.read(entry_points).decode()
    package = ROOT / "dream_trainer"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    examples = {name for files in EXAMPLES.values() for name in files} | {*LAUNCH, "check_train.py"}
    own = {path.relative_to(ROOT).as_posix() for path in files}
    assert packed == own | {f"dream_trainer/examples/{name}" for name in examples}
    assert "dream_trainer/py.typed" in packed


def test_an_installed_wheel_begins_projects(archives: Path, tmp_path: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    command = [sys.executable, "-m", "dream_trainer", "new", "mine", "--from", "gpt"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / "mine/model.py").read_text() == (ROOT / "examples/gpt/model.py").read_text()


def test_the_source_archive_has_what_its_tests_need(archives: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("which files are kept is known in a clone alone")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    kept = {name for name in listed.splitlines() if name.split("/")[0] not in NOT_PUBLISHED and (ROOT / name).exists()}
    (source,) = archives.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed - {"PKG-INFO"} == kept


@pytest.mark.parametrize("names", ["packages", "all"])
def test_importing_opens_no_socket_and_starts_no_thread_or_process(names: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WATCHED, names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["nothing", "1"], done.stdout + done.stderr
