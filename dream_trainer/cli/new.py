"""`dream-trainer new`: a directory with a copy of an example."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from dream_trainer.errors import ConfigError

Template = Literal["image", "text", "gan", "diffusion", "ppo", "contrastive", "gpt"]

EXAMPLES: dict[Template, tuple[str, ...]] = {
    "image": ("image_classification.py", "digits.py", "pictures.py"),
    "text": ("text_classification.py", "packages.py", "pictures.py"),
    "gan": ("gan.py", "digits.py", "pictures.py"),
    "diffusion": ("diffusion.py", "denoiser.py", "digits.py", "pictures.py"),
    "ppo": ("ppo.py", "cart_pole.py", "pictures.py"),
    "contrastive": ("contrastive.py", "digits.py", "pictures.py"),
    "gpt": ("gpt/train.py", "gpt/model.py", "gpt/corpus.py", "gpt/texts.py", "gpt/plot.py"),
}
"""Files below `examples/`: the program, and the modules that it imports."""
LAUNCH = ("launch/slurm.sh", "launch/kubernetes.yaml", "launch/jobset.yaml")


@dataclass(frozen=True, kw_only=True)
class New:
    """Copy one of the examples into a new directory, with files that start it on a cluster."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Name of the project and its directory: letters, digits, - and _."""
    template: Annotated[Template, arg(name="from")] = "image"
    """The example."""

    def run(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", self.name):
            raise ConfigError(f"{self.name!r} cannot be a project's name. Use a letter, then letters, digits, - and _.")
        directory = Path(self.name)
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise ConfigError(f"{directory} exists and is not an empty directory. Use another name, or remove it.")
        program, *modules = EXAMPLES[self.template]
        copies = {program: "train.py", **{path: Path(path).name for path in modules}}
        copies |= {"check_train.py": "test_train.py"} | {path: path for path in LAUNCH}
        # The launch files start the example gpt.
        names = {f"examples/{path}": copy for path, copy in {**copies, "gpt/train.py": "train.py"}.items()}
        names |= {'project="examples"': f'project="{self.name}"', "runs/examples/": f"runs/{self.name}/"}
        packages = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
        needed = set()
        # In the package if a wheel installed it, next to the package in a clone.
        above = Path(__file__).parent.parent
        examples = above / "examples" if (above / "examples").is_dir() else above.parent / "examples"
        for path, copy in copies.items():
            text = (examples / path).read_text(encoding="utf-8")
            needed |= {package for module, package in packages.items() if f"from {module}" in text}
            for old, new in names.items():
                text = text.replace(old, new)
            (directory / copy).parent.mkdir(parents=True, exist_ok=True)
            (directory / copy).write_text(text, encoding="utf-8")
            shutil.copymode(examples / path, directory / copy)
        print(f"{directory}: {', '.join(copies.values())}")
        print(f"next: cd {directory}; pip install {' '.join(sorted(needed))}; python train.py")
