"""Writes a project from an example: the example itself, under the project's name, and what belongs around it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dream_trainer.cli.project_texts import CONFIG, IGNORED, README, TEST
from dream_trainer.errors import ConfigError

if TYPE_CHECKING:
    from dream_trainer.cli.new import Template


class Source(NamedTuple):
    """What a template is made of.

    Attributes:
        program: The example, below `examples/`.
        beside: Files that it imports, likewise.
        requires: Packages that it needs beside Dream Trainer.
        check: Arguments for a run of some seconds, for the project's test.
        metric: What that run logs in training, and has to make better.
        rises: Whether more of it is better.
    """

    program: str
    check: str
    beside: tuple[str, ...] = ()
    requires: tuple[str, ...] = ("matplotlib", "scikit-learn")
    metric: str = "train/loss"
    rises: bool = False


SOURCES: dict[Template, Source] = {
    "image": Source("image_classification.py", "--width 16 --depth 1 --training-parameters.max-steps 40"),
    "text": Source(
        "text_classification.py",
        "--training-parameters.max-steps 60",
        requires=("matplotlib",),
    ),
    "gan": Source("gan.py", "--width 16 --training-parameters.max-steps 56", metric="train/penalty"),
    "diffusion": Source("diffusion.py", "--width 64 --depth 1 --training-parameters.max-steps 50"),
    "ppo": Source(
        "ppo.py",
        "--learning-rate 5e-3 --training-parameters.max-steps 10",
        requires=("matplotlib",),
        metric="train/return",
        rises=True,
    ),
    "contrastive": Source("contrastive.py", "--width 16 --training-parameters.max-steps 20"),
    "gpt": Source(
        "gpt/train.py",
        "--model.n-layers 2 --model.n-heads 2 --model.dim 16 --model.window 32 --sample-bytes 8 --warmup-steps 2 "
        "--training-parameters.max-steps 20",
        beside=("gpt/model.py", "gpt/corpus.py", "gpt/texts.py", "gpt/plot.py"),
        requires=("matplotlib",),
    ),
}
LAUNCH = ("launch/slurm.sh", "launch/kubernetes.yaml", "launch/jobset.yaml")


def examples_folder() -> Path:
    """Where the examples lie: in the package that a wheel installed; in a clone beside it."""
    package = Path(__file__).parent.parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parent / "examples"


def write_project(name: str, template: Template) -> None:
    """Makes the directory `name` here, with a project in it, and says what to do next.

    Raises:
        ConfigError: The name cannot be that of a project, or its directory exists and holds something.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ConfigError(
            f"{name!r} cannot be a project's name, which is a directory's and a run's too. Use a letter, then letters, "
            "digits, - and _; the directory is made in the one that you are in."
        )
    directory = Path(name)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(f"{name} exists already and is not an empty directory. Use another name, or remove it.")
    files = project_files(name, template)
    for path, text in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    shutil.copymode(examples_folder() / LAUNCH[0], directory / LAUNCH[0])
    print(f"{name}: {', '.join(files)}")
    print(f"next: cd {name}; pip install -r requirements.txt; pytest; python train.py --config run.yaml")


def project_files(name: str, template: Template) -> dict[str, str]:
    """The texts of a project's files, by their paths in its directory."""
    source, folder = SOURCES[template], examples_folder()
    files = {"train.py": _read(folder / source.program, name, source)}
    files |= {Path(path).name: _read(folder / path, name, source) for path in source.beside}
    requirements = ["dream-trainer", *source.requires, "pytest"]
    about = files["train.py"].split('"""')[1].split("\n", 1)[0]
    filled = {"NAME": name, "TEMPLATE": template, "ABOUT": about, "CHECK": source.check, "METRIC": source.metric}
    filled["BETTER"] = "last > 1.1 * first" if source.rises else "last < 0.95 * first"
    files["test_train.py"] = _fill(TEST, filled)
    files["README.md"] = _fill(README, filled)
    files["requirements.txt"] = "".join(f"{package}\n" for package in requirements)
    files["run.yaml"], files[".gitignore"] = CONFIG, IGNORED
    return files | {path: _read(folder / path, name, source) for path in LAUNCH}


def _read(path: Path, name: str, source: Source) -> str:
    """An example's file, with this project's paths and name in it."""
    text = path.read_text(encoding="utf-8")
    for program in (source.program, "gpt/train.py"):  # the launch files name the second one
        text = text.replace(f"examples/{program}", "train.py")
    for file in source.beside:
        text = text.replace(f"examples/{file}", Path(file).name)
    text = text.replace("runs/examples/", f"runs/{name}/").replace("examples/launch/", "launch/")
    return text.replace('project="examples"', f'project="{name}"')


def _fill(text: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"<{key}>", value)
    return text
