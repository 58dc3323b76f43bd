"""`dream-trainer new`: its arguments. What it does is in project.py, which `run` imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

Template = Literal["image", "text", "gan", "diffusion", "ppo", "contrastive", "gpt"]


@dataclass(frozen=True, kw_only=True)
class New:
    """Begin a project from one of the examples: a directory with trainer, test, README and files for clusters."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """The project, and its directory, which is made here: letters, digits, - and _."""
    template: Annotated[Template, arg(name="from")] = "image"
    """Which example."""

    def run(self) -> int:
        """Writes it, and says what to do next."""
        from dream_trainer.cli.project import write_project

        write_project(self.name, self.template)
        return 0
