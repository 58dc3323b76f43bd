"""The plan of the last save, kept so that saves of the same tensors are not planned again.

Planning is Python's work on every tensor of every rank; tools/bench/planning.py measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan


@dataclass
class KnownPlan:
    """The plan of the last save on one rank, for the next one.

    Attributes:
        layout: How each tensor lay, by name.
        plan: What this rank writes.
        metadata: On rank 0, what is said of all tensors.
    """

    layout: dict[str, tuple[Any, ...]] | None = None
    plan: SavePlan | None = None
    metadata: Metadata | None = None
