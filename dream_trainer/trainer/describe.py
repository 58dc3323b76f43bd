"""What `describe()` shows: the setup order with its reasons, who listens to which event, and the mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from dream_trainer.compat.pytorch import reading_waits
from dream_trainer.trainer.event_table import describe_events
from dream_trainer.trainer.mesh_table import mesh_lines
from dream_trainer.trainer.step.gradients import guards_itself

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def describe(trainer: AbstractTrainer) -> str:
    """Markdown of the trainer's setup order and event table; works before launch."""
    name = type(trainer).__name__
    stages = trainer._setup_stages() or [("setup", f"{name} sets itself up")]
    lines = [f"# {name}", "", "## Setup order", "", "| # | Stage | Why here |", "| --- | --- | --- |"]
    lines += [f"| {number} | {stage} | {reason} |" for number, (stage, reason) in enumerate(stages, start=1)]
    lines += ["", "## Events", "", describe_events(trainer)]
    mesh = mesh_lines(trainer)
    if mesh:
        lines += ["", "## Mesh", "", *mesh]
    optimizers = trainer.named_optimizers()
    if optimizers:
        lines += ["", "## Non-finite gradients", "", "| Optimizer | How a bad step is left out |", "| --- | --- |"]
        lines += [f"| {name} | {_guard(trainer, optimizer)} |" for name, optimizer in optimizers.items()]
    return "\n".join(lines)


def _guard(trainer: AbstractTrainer, optimizer: Optimizer) -> str:
    if trainer.config.training_parameters.nonfinite == "retry":
        return "the norm is read on the host at each step, to run the window again"
    if trainer._world is not None and not reading_waits(trainer._world.parameter_device):
        return "the norm is read on the host at each step, which waits for nothing on a CPU"
    if guards_itself(optimizer, trainer._parallel.gradients.shard_of):
        return "on the device, without waiting for it"
    return "the norm is read on the host at each step (a fused optimizer would not need that)"
