"""What `describe()` shows: the setup order with its reasons, and who listens to which event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.trainer.events import describe_events

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def describe(trainer: AbstractTrainer) -> str:
    """Markdown of the trainer's setup order and event table; works before launch."""
    from dream_trainer.trainer.abstract import AbstractTrainer

    name = type(trainer).__name__
    stages = trainer._setup_stages() or [("setup", f"{name} sets itself up")]
    lines = [f"# {name}", "", "## Setup order", "", "| # | Stage | Why here |", "| --- | --- | --- |"]
    lines += [f"| {number} | {stage} | {reason} |" for number, (stage, reason) in enumerate(stages, start=1)]
    lines += ["", "## Events", "", describe_events(trainer, AbstractTrainer)]
    return "\n".join(lines)
