"""What the tests of this folder save: small, quick, and with every kind of content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.snapshot import Snapshot
from dream_trainer.checkpoint.store import write_checkpoint
from dream_trainer.distributed.ranks import Ranks

DESCRIPTION = {"epoch": 1, "samples_seen": 64, "mesh_shape": {"dp_shard": 1}, "config": {"seed": 0}, "metrics": {}}


def some_tensors(fill: float = 1.0) -> dict[str, Tensor]:
    """Two tensors of different types."""
    return {
        "models.net.weight": torch.full((3, 4), float(fill)) + torch.arange(4),
        "models.net.steps": torch.tensor(int(fill)),
    }


def make_snapshot(
    step: int,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    shared: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    rank_tensors: Mapping[str, Tensor] | None = None,
    description: Mapping[str, Any] | None = None,
) -> Snapshot:
    """A snapshot of whatever is given, the rest filled in."""
    return Snapshot(
        step=step,
        tensors=some_tensors(step) if tensors is None else tensors,
        shared=typed_json.dumps({"step": step} if shared is None else dict(shared)).encode(),
        rank_state=typed_json.dumps({} if rank_state is None else dict(rank_state)).encode(),
        rank_tensors={} if rank_tensors is None else rank_tensors,
        description=DESCRIPTION if description is None else description,
    )


def save(
    root: Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    shared: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    rank_tensors: Mapping[str, Tensor] | None = None,
    description: Mapping[str, Any] | None = None,
    world: Ranks | None = None,
    replace: bool = False,
) -> Path:
    """Writes a checkpoint of whatever is given, the rest filled in."""
    snapshot = make_snapshot(
        step,
        tensors=tensors,
        shared=shared,
        rank_state=rank_state,
        rank_tensors=rank_tensors,
        description=description,
    )
    return write_checkpoint(root, snapshot, world=Ranks.alone() if world is None else world, replace=replace)
