"""What the tests of this folder save: small, quick, and with every kind of content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dream_trainer.checkpoint.store import write_checkpoint
from dream_trainer.checkpoint.world import Alone, CheckpointWorld

DESCRIPTION = {"epoch": 1, "samples_seen": 64, "mesh_shape": {"dp_shard": 1}, "config": {"seed": 0}, "metrics": {}}


def some_tensors(fill: float = 1.0) -> dict[str, Tensor]:
    """Two tensors of different types."""
    return {
        "models.net.weight": torch.full((3, 4), float(fill)) + torch.arange(4),
        "models.net.steps": torch.tensor(int(fill)),
    }


def save(
    root: Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    shared: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    rank_tensors: Mapping[str, Tensor] | None = None,
    description: Mapping[str, Any] | None = None,
    world: CheckpointWorld | None = None,
) -> Path:
    """Writes a checkpoint of whatever is given, the rest filled in."""
    return write_checkpoint(
        root,
        step,
        tensors=some_tensors(step) if tensors is None else tensors,
        shared={"step": step} if shared is None else shared,
        rank_state={} if rank_state is None else rank_state,
        rank_tensors={} if rank_tensors is None else rank_tensors,
        manifest=DESCRIPTION if description is None else description,
        world=Alone() if world is None else world,
    )
