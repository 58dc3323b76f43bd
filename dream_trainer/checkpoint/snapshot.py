"""One rank's contribution to a checkpoint, taken at one moment and unchanged until it is on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint. State other than tensors is already serialised, so that it cannot change."""

    step: int  # optimizer steps completed
    tensors: Mapping[str, Tensor]
    # Sharded (DTensor), or the same on all ranks (plain): of those any one rank's is saved. Ranks may differ in names.
    shared: bytes  # state that is the same on all ranks, as typed JSON; rank 0's is written
    rank_state: bytes  # state that only this rank has, as typed JSON
    rank_tensors: Mapping[str, Tensor]
    # Plain tensors that only this rank has, and those that differ from rank 0's, under their name in `tensors`.
    description: Mapping[str, Any]
    # The fields `epoch`, `samples_seen`, `mesh_shape`, `config`, `metrics` and `parent` of the manifest.


@dataclass
class KnownPlan:
    """The last save's plan on one rank, so that the same tensors are not planned again (tools/bench/planning.py)."""

    layout: dict[str, tuple[Any, ...]] | None = None  # maps names to tensors' layouts
    plan: SavePlan | None = None
    metadata: Metadata | None = None  # on rank 0, of all tensors
